"""The order of what the driver does, its pool and journal replaced by what writes calls down."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flexray.batches import Batch
from flexray.driver import Driver
from flexray.errors import RunFailed
from flexray.prefetch import PlannedBatch
from flexray.profiling import Profiler, Steps
from flexray.stopping import StopRequest
from flexray.validation import ValidationSum


class Pool:
    """Ranks that do nothing."""

    def __init__(self):
        self.told = []

    def start_profile(self):
        self.told.append("start")

    def stop_profile(self):
        self.told.append("stop")
        return [b"trace"]

    def wait(self, calls, what):
        return calls


class Journal:
    """Keeps what it is told; `fails` at one step, as a callback does."""

    def __init__(self, fails=None):
        self.told, self.fails, self.first_step = [], fails, 1

    def message(self, text):
        pass

    def step(self, planned, reports, generation):
        self.told.append(("step", planned.batch.step))
        if planned.batch.step == self.fails:
            raise RunFailed("Mine.on_step failed")

    def validation(self, event):
        self.told.append(("validation", event.step, event.sequences))

    def checkpoints(self, ended):
        self.told += [("checkpoint", step) for step in ended]


class Saver:
    """Never done before it is waited for."""

    def __init__(self):
        self.saving = []

    def start(self, step):
        ended, self.saving = self.saving, [step]
        return ended

    def poll(self, step):
        return []

    def finish(self):
        ended, self.saving = self.saving, []
        return ended

    def last(self, step):
        return [*self.finish(), step]


class Scripted(Driver):
    """Works through given batches, none of which has a label token."""

    def __init__(self, batches, folder, *, every=0, fails=None, profile=None, stop_at=None):
        self.pool, self.journal, self.saver = Pool(), Journal(fails), Saver()
        self.profiler = Profiler(self.pool, profile, folder)
        self.stop, self.validation = StopRequest(), ValidationSum()
        self.nonfinite = SimpleNamespace(check=lambda reports: None)
        self.generation = SimpleNamespace(number=1, world=1)
        self.calibrator = SimpleNamespace(observe=lambda *spans: None)
        self.config = SimpleNamespace(checkpoint=SimpleNamespace(every=every))
        self.prefetch = self._deal(batches, stop_at)

    def _deal(self, batches, stop_at):
        for number, batch in enumerate(batches):
            if number == stop_at:
                self.stop.request()
            yield PlannedBatch(batch, None, 0.0, 0.0)

    def _state_after(self, batch):
        return batch.step


def batch(step, *, held_out=False, ends_step=True):
    return Batch(step, (0, 1), (5, 5), 0, held_out=held_out, ends_step=ends_step)


@pytest.fixture(autouse=True)
def no_spans(monkeypatch):
    monkeypatch.setattr("flexray.driver.spans", lambda reports: ())


@pytest.mark.parametrize("stop_at", [1, 2])
def test_a_stop_during_validation_waits_for_all_of_it(tmp_path, stop_at):
    looked_at = [
        batch(1, ends_step=False),
        batch(1, held_out=True, ends_step=False),
        batch(1, held_out=True),
    ]
    driver = Scripted([*looked_at, batch(2)], tmp_path, stop_at=stop_at)
    driver._run_steps()
    assert driver.journal.told == [("step", 1), ("validation", 1, 4), ("checkpoint", 1)]


def test_a_stop_between_steps_ends_before_the_next(tmp_path):
    driver = Scripted([batch(1), batch(2), batch(3)], tmp_path, stop_at=2)
    driver._run_steps()
    assert driver.journal.told == [("step", 1), ("step", 2), ("checkpoint", 2)]


def test_a_run_that_fails_keeps_the_checkpoint_that_is_being_written(tmp_path):
    driver = Scripted([batch(step) for step in range(1, 6)], tmp_path, every=2, fails=3)
    with pytest.raises(RunFailed, match=r"Mine\.on_step failed"):
        driver._run_steps()
    assert driver.journal.told == [("step", 1), ("step", 2), ("step", 3), ("checkpoint", 2)]


def test_steps_without_a_label_token_are_profiled_too(tmp_path):
    folder = tmp_path / "profile"
    driver = Scripted([batch(1), batch(2), batch(3)], folder, profile=Steps(2, 3))
    driver._run_steps()
    assert driver.pool.told == ["start", "stop"]
    assert (folder / "rank-0.json").read_bytes() == b"trace"
