"""Checkpoints while training goes on: the ranks copy and write, the driver marks what is whole."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import ray

from flexray.actors.pool import Pool
from flexray.actors.worker import SaveReport
from flexray.checkpoints import CheckpointFolder, RunState
from flexray.errors import RunFailed, UserError
from flexray.events import CheckpointEvent


def check_shared(pool: Pool, folder: CheckpointFolder) -> None:
    """Raises UserError unless every rank sees the driver's folder of checkpoints, or it is a URL.

    Else each node would keep shards of its own, and no checkpoint would be whole.
    """
    if not folder.is_local:
        return
    with folder.token() as path:
        blind = [rank for rank, sees in enumerate(pool.sees(str(path))) if not sees]
    if blind:
        raise UserError(
            f"{folder.root}: ranks {blind} do not see this folder of checkpoints: set "
            "checkpoint.dir to a folder that all nodes share, or to a URL"
        )


Ended = CheckpointEvent | str
"""How a checkpoint ended: its event, or why it was not written."""


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

    def start(self, state: RunState) -> list[Ended]:
        """Has the ranks save behind what is queued; first `finish`es what is being written.

        Returns how that ended, and why this one could not begin.
        """
        ended = [self.finish()]
        try:
            location = self.folder.begin(state.step)
        except Exception as error:  # each file system raises its own
            ended.append(self._why(state, error))
        else:
            self._under_way = _Saving(state, *self._pool.save(location), time.perf_counter())
        return [end for end in ended if end is not None]

    def poll(self, steps_done: int) -> Ended | None:
        """`finish`, if that takes no waiting.

        `steps_done`: the last step that is written down; no checkpoint is whole before its step is.
        """
        saving = self._under_way
        if saving is None or saving.state.step > steps_done:
            return None
        calls = saving.copies + saving.writes
        done, _ = ray.wait(calls, num_returns=len(calls), timeout=0)
        return self.finish() if len(done) == len(calls) else None

    def finish(self) -> Ended | None:
        """Waits until what is being written is whole: its event, or why it failed.

        Raises PoolError when a rank is lost.
        """
        saving, self._under_way = self._under_way, None
        if saving is None:
            return None
        copies: list[SaveReport] = self._pool.wait(saving.copies, "save")
        failures = [why for why in self._pool.wait(saving.writes, "save") if why]
        state = replace(saving.state, counters=copies[0].counters)
        try:
            if failures:
                raise OSError(failures[0])
            checkpoint = self.folder.publish(state, self._keep)
        except Exception as error:  # each file system raises its own
            return self._why(state, error)
        self.newest = state.step
        return CheckpointEvent(
            step=state.step,
            location=checkpoint.location,
            blocked_s=max(report.blocked_s for report in copies),
            write_s=time.perf_counter() - saving.began,
        )

    def last(self, state: RunState) -> list[Ended]:
        """What is under way and, unless that was it, the checkpoint of the last step.

        Raises RunFailed when that could not be written.
        """
        ended = [self.finish()]
        if state.step > self.newest:
            ended += [*self.start(state), self.finish()]
        told = [end for end in ended if end is not None]
        if state.step > self.newest:
            raise RunFailed(f"the last checkpoint could not be written: {told[-1]}")
        return told

    def _why(self, state: RunState, error: Exception) -> str:
        return f"step {state.step} in {self.folder.root}: {' '.join(str(error).split())}"
