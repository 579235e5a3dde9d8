"""Checkpoints while training goes on: the ranks copy and write, the driver marks what is whole."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import ray

from flexray.actors.crew import PoolError
from flexray.actors.pool import Pool
from flexray.actors.worker import SaveReport
from flexray.checkpoints import CheckpointFolder, RunState
from flexray.errors import RunFailed
from flexray.events import CheckpointEvent

Ended = CheckpointEvent | str
"""How a checkpoint ended: its event, or a line that says what went wrong."""


@dataclass(frozen=True)
class _Saving:
    """A checkpoint that is being written."""

    state: RunState  # without the engine's counters, which the ranks report
    copies: list[Any]
    writes: list[Any]
    began: float


class Saver:
    """Writes one checkpoint at a time.

    A write that fails is told and training goes on: the older ones are good. Only at the end of a
    run it is an error.
    """

    def __init__(self, pool: Pool, folder: CheckpointFolder, keep: int, newest: int) -> None:
        """`newest`: step of the newest whole checkpoint, 0 without one."""
        self.folder, self.newest = folder, newest
        self._pool, self._keep = pool, keep
        self._under_way: _Saving | None = None
        self._why = ""  # the newest failure

    def start(self, state: RunState) -> list[Ended]:
        """Has the ranks save behind what is queued: why it could not begin, if so.

        Nothing may be being written.
        """
        assert self._under_way is None
        try:
            location = self.folder.begin(state.step)
        except Exception as error:  # each file system raises its own
            return [self._not_written(state, error)]
        self._under_way = _Saving(state, *self._pool.save(location), time.perf_counter())
        return []

    def poll(self, steps_done: int) -> list[Ended]:
        """`finish`, if that takes no waiting."""
        saving = self._under_way
        if saving is None or saving.state.step > steps_done:
            return []
        calls = saving.copies + saving.writes
        done, _ = ray.wait(calls, num_returns=len(calls), timeout=0)
        return self.finish(steps_done) if len(done) == len(calls) else []

    def finish(self, steps_done: int) -> list[Ended]:
        """Waits until what is being written is whole, and removes old ones: how that ended.

        `steps_done`: the last step that is written down. A checkpoint of a later one is given up:
        a resume would leave those steps out. Raises PoolError when a rank is lost.
        """
        saving, self._under_way = self._under_way, None
        if saving is None:
            return []
        if saving.state.step > steps_done:
            return [self._not_written(saving.state, ValueError("its step is not written down"))]
        copies: list[SaveReport] = self._pool.wait(saving.copies, "save")
        failures = [why for why in self._pool.wait(saving.writes, "save") if why]
        state = replace(saving.state, counters=copies[0].counters)
        try:
            if failures:
                raise OSError(failures[0])
            checkpoint = self.folder.publish(state)
        except Exception as error:  # each file system raises its own
            return [self._not_written(state, error)]
        self.newest = state.step
        event = CheckpointEvent(
            step=state.step,
            location=checkpoint.location,
            blocked_s=max(report.blocked_s for report in copies),
            write_s=time.perf_counter() - saving.began,
        )
        try:
            self.folder.prune(self._keep, state.step)
        except Exception as error:
            return [event, f"old checkpoints not removed: {self._where(state, error)}"]
        return [event]

    @property
    def step(self) -> int | None:
        """Of the checkpoint that is being written, if one is."""
        return self._under_way.state.step if self._under_way else None

    def break_off(self, steps_done: int) -> list[Ended]:
        """Before the ranks change: keeps what is whole, and gives up what is being written.

        Returns how that ended, as `poll` does.
        """
        try:
            if ended := self.poll(steps_done):
                return ended
        except PoolError:
            pass
        saving, self._under_way = self._under_way, None
        if saving is None:
            return []
        return [f"checkpoint of step {saving.state.step} not written: the ranks changed meanwhile"]

    def last(self, state: RunState) -> list[Ended]:
        """What is under way and, unless that was it, the checkpoint of the last step.

        All steps are written down. Raises RunFailed when it could not be written.
        """
        ended = self.finish(state.step)
        if state.step > self.newest:
            ended += [*self.start(state), *self.finish(state.step)]
        if state.step > self.newest:
            raise RunFailed(f"the last checkpoint could not be written: {self._why}")
        return ended

    def _not_written(self, state: RunState, error: Exception) -> str:
        self._why = self._where(state, error)
        return f"checkpoint not written, training goes on: {self._why}"

    def _where(self, state: RunState, error: Exception) -> str:
        return f"step {state.step} in {self.folder.root}: {' '.join(str(error).split())}"
