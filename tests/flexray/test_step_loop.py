"""The order of what is done in a generation, its pool and journal replaced by what writes down."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flexray.actors.membership import Membership
from flexray.batches import Batch
from flexray.driver import Driver
from flexray.errors import RunFailed
from flexray.ledger import Done, Ledger
from flexray.prefetch import PlannedBatch
from flexray.profiling import Profiler, Steps
from flexray.solver.plan import PlanningError
from flexray.step_loop import StepLoop
from flexray.stopping import StopRequest


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

    def is_busy(self, calls):
        return False


class Journal:
    """Keeps what it is told; `fails` at one step, as a callback does."""

    def __init__(self, fails=None):
        self.told, self.fails, self.first_step = [], fails, 1

    def message(self, text):
        pass

    steps_done = 0

    def done(self, planned, reports, generation):
        return Done(planned, reports, None)

    def commit(self, done):
        self.told.append(("step", done.batch.step))
        self.steps_done = done.batch.step
        if done.batch.step == self.fails:
            raise RunFailed("Mine.on_commit failed")

    def validation(self, event):
        self.told.append(("validation", event.step, event.sequences))

    def checkpoints(self, ended):
        self.told += [("checkpoint", step) for step in ended]

    state = ""


class Saver:
    """Never done before it is waited for."""

    def __init__(self):
        self.saving = []

    @property
    def step(self):
        return self.saving[0] if self.saving else None

    def start(self, step):
        assert not self.saving
        self.saving = [step]
        return []

    def poll(self, steps_done):
        return []

    def finish(self, steps_done):
        ended, self.saving = self.saving, []
        return [step for step in ended if step <= steps_done]

    def last(self, step):
        return [*self.finish(step), step]


class Scripted(StepLoop):
    """Works through given batches, none of which has a label token, on one rank."""

    def __init__(self, batches, folder, *, every=0, fails=None, profile=None, stop_at=None):
        pool = Pool()
        super().__init__(
            pool,
            SimpleNamespace(number=1, world=1),
            self._deal(batches, stop_at),
            None,
            ledger=Ledger(iter(batches)),
            journal=Journal(fails),
            saver=Saver(),
            profiler=Profiler(pool, profile, folder),
            nonfinite=SimpleNamespace(check=lambda reports: None),
            calibrator=SimpleNamespace(observe=lambda *spans: None),
            state_after=lambda batch: batch.step,
            save_every=every,
            copy_every=1,
        )
        self.is_stopped = False

    def _deal(self, batches, stop_at):
        for number, batch in enumerate(batches):
            self.is_stopped = self.is_stopped or number == stop_at
            next(self.ledger)
            yield PlannedBatch(batch, None, 0.0, 0.0, None)

    def work(self):
        return self.run(lambda: self.is_stopped)


def batch(step, *, held_out=False, ends_step=True):
    return Batch(step, (0, 1), (5, 5), 0, held_out=held_out, ends_step=ends_step)


@pytest.mark.parametrize("stop_at", [1, 2])
def test_a_stop_during_validation_waits_for_all_of_it(tmp_path, stop_at):
    looked_at = [
        batch(1, ends_step=False),
        batch(1, held_out=True, ends_step=False),
        batch(1, held_out=True),
    ]
    loop = Scripted([*looked_at, batch(2)], tmp_path, stop_at=stop_at)
    assert loop.work() is False
    assert loop.journal.told == [("step", 1), ("validation", 1, 4)]


def test_a_stop_between_steps_ends_before_the_next(tmp_path):
    loop = Scripted([batch(1), batch(2), batch(3)], tmp_path, stop_at=2)
    assert loop.work() is False
    assert loop.journal.told == [("step", 1), ("step", 2)]
    assert [b.step for b in loop.ledger.rewind()] == [3]  # what was dealt is dealt again


def test_a_run_without_more_batches_is_through(tmp_path):
    loop = Scripted([batch(1), batch(2)], tmp_path)
    assert loop.work() is True
    assert loop.journal.told == [("step", 1), ("step", 2)]


def test_a_run_that_fails_keeps_the_checkpoint_that_is_being_written(tmp_path):
    loop = Scripted([batch(step) for step in range(1, 6)], tmp_path, every=2, fails=3)
    driver = Driver.__new__(Driver)
    driver.loop, driver.saver, driver.journal = loop, loop.saver, loop.journal
    driver.stop, driver._is_over = StopRequest(), lambda: False
    with pytest.raises(RunFailed, match=r"Mine\.on_commit failed"):
        driver._run_steps()
    assert driver.journal.told == [("step", 1), ("step", 2), ("step", 3), ("checkpoint", 2)]


@pytest.mark.parametrize("every", [1, 2])
def test_a_checkpoint_is_waited_for_when_the_next_is_due_and_its_step_is_written_first(
    tmp_path, every
):
    loop = Scripted([batch(step) for step in range(1, 6)], tmp_path, every=every)
    loop.work()
    told = loop.journal.told
    saved = [step for kind, step in told if kind == "checkpoint"]
    assert saved == list(range(every, 6, every))[:-1]  # the last one is still being written
    assert all(told.index(("step", step)) < told.index(("checkpoint", step)) for step in saved)


def test_no_checkpoint_is_begun_while_another_generation_waits_for_the_last_one(tmp_path):
    loop = Scripted([batch(step) for step in range(1, 6)], tmp_path, every=1)
    loop.holds_saves = True
    loop.work()
    assert loop.saver.step is None and len(loop.journal.told) == 5


def test_steps_without_a_label_token_are_profiled_too(tmp_path):
    folder = tmp_path / "profile"
    loop = Scripted([batch(1), batch(2), batch(3)], folder, profile=Steps(2, 3))
    loop.work()
    assert loop.pool.told == ["start", "stop"]
    assert (folder / "rank-0.json").read_bytes() == b"trace"


class Outgrown(Scripted):
    """Its second batch does not fit these ranks."""

    def _deal(self, batches, stop_at):
        yield from super()._deal(batches[:1], stop_at)
        raise PlanningError("row 0 has length 9 and the largest group holds 8 tokens")


@pytest.mark.parametrize("target", [1, 2])
def test_a_batch_that_these_ranks_cannot_hold_waits_for_more_if_there_may_be_more(tmp_path, target):
    loop = Outgrown([batch(1), batch(2)], tmp_path)
    driver = Driver.__new__(Driver)
    driver.loop, driver.saver, driver.journal = loop, loop.saver, loop.journal
    driver.generation, driver.membership = loop.generation, Membership(target, 1)
    driver.stop, driver._is_over = StopRequest(), lambda: False
    driver.ledger, driver.gave_up, driver._state_after = loop.ledger, "", lambda batch: batch.step
    if target == 1:  # what was trained is kept
        with pytest.raises(PlanningError, match="row 0 has length 9"):
            driver._run_steps()
        assert driver.membership.least == 1
        assert loop.journal.told == [("step", 1), ("checkpoint", 1)]
    else:
        assert driver._run_steps() == "memory"
        assert driver.membership.least == 2  # none is formed without a second rank
        assert loop.journal.told == [("step", 1)]
