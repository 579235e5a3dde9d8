"""Checkpoints by real actors: published when whole, told when they cannot be written."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from flexray.actors.membership import Membership
from flexray.actors.pool import Pool
from flexray.actors.seat import Initial, Saved
from flexray.actors.settings import EngineSettings
from flexray.checkpoints import CheckpointFolder
from flexray.errors import RunFailed
from flexray.events import CheckpointEvent
from flexray.saving import Saver
from tests.actors.models import config
from tests.flexray.test_checkpoints import state


@pytest.fixture(scope="module")
def pool(two_nodes, five_texts):
    settings = EngineSettings(model=config(vocab_size=256), timeout_s=60)
    with Pool(Membership(2, 2), "cpu", settings, five_texts) as pool:
        pool.start()
        pool.form(1, Initial())
        yield pool


def test_a_checkpoint_is_published_once_its_step_is_written_down(pool, tmp_path):
    folder = CheckpointFolder(str(tmp_path))
    saver = Saver(pool, folder, keep=1, newest=0)
    assert saver.poll(5) == saver.finish(5) == []
    assert saver.start(state(5, counters={})) == []
    deadline = time.monotonic() + 60
    while not (ended := saver.poll(5)):
        assert saver.poll(4) == [] and folder.steps() == []
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (ended,) = ended
    assert isinstance(ended, CheckpointEvent) and (ended.step, saver.newest) == (5, 5)
    assert ended.write_s > ended.blocked_s > 0
    found = folder.newest()
    assert found.location == ended.location
    assert found.state.counters == {"updates": 0}
    pool.regroup()
    pool.form(2, Saved(found.location, found.state.step, found.state.counters))


def test_the_last_one_waits_for_the_one_before(pool, tmp_path):
    folder = CheckpointFolder(str(tmp_path))
    saver = Saver(pool, folder, keep=2, newest=0)
    saver.start(state(1, counters={}))
    assert saver.step == 1
    assert [event.step for event in saver.finish(1)] == [1]
    saver.start(state(2, counters={}))
    assert [event.step for event in saver.last(state(2, counters={}))] == [2]
    assert saver.last(state(2, counters={})) == []
    assert folder.steps() == [1, 2]


def test_one_that_cannot_be_written_is_told_and_the_last_one_is_an_error(pool, tmp_path):
    folder = CheckpointFolder(str(tmp_path / "run"))
    saver = Saver(pool, folder, keep=2, newest=0)
    (tmp_path / "run").mkdir()
    # A file where the folder of the shards is to be.
    Path(folder.begin(3)).write_text("")
    folder.begin = lambda step: f"{folder.root}/step-{step:08d}.unfinished"
    saver.start(state(3, counters={}))
    (told,) = saver.finish(3)
    why = f"checkpoint not written, training goes on: step 3 in {folder.root}: "
    assert told.startswith(why) and "\n" not in told
    with pytest.raises(RunFailed, match="the last checkpoint could not be written: step 3 in"):
        saver.last(state(3, counters={}))
    assert folder.steps() == []


def test_an_old_one_that_cannot_be_removed_does_not_spoil_the_new_one(pool, tmp_path):
    folder = CheckpointFolder(str(tmp_path))
    saver = Saver(pool, folder, keep=1, newest=0)

    def refuses(path):
        raise PermissionError(f"{path}: not yours")

    saver.last(state(1, counters={}))
    saver.start(state(2, counters={}))
    folder._remove = refuses
    event, told = saver.finish(2)
    assert (event.step, saver.newest, folder.steps()) == (2, 2, [1, 2])
    assert told.startswith(f"old checkpoints not removed: step 2 in {folder.root}: ")
    assert "step-00000001: not yours" in told and "\n" not in told
    assert saver.last(state(2, counters={})) == []


def test_one_that_cannot_begin_is_told_too(pool, tmp_path):
    folder = CheckpointFolder(str(tmp_path / "file" / "run"))
    (tmp_path / "file").write_text("")
    saver = Saver(pool, folder, keep=2, newest=0)
    (told,) = saver.start(state(3, counters={}))
    assert f"not written, training goes on: step 3 in {folder.root}: " in told
    assert saver.finish(5) == []
    with pytest.raises(RunFailed, match="the last checkpoint could not be written: step 3 in"):
        saver.last(state(3, counters={}))


def test_none_is_whole_before_its_step_is_written_down(pool, tmp_path):
    folder = CheckpointFolder(str(tmp_path))
    saver = Saver(pool, folder, keep=2, newest=0)
    saver.start(state(4, counters={}))
    (told,) = saver.finish(3)
    assert "step 4" in told and "its step is not written down" in told
    assert folder.steps() == [] and saver.step is None
