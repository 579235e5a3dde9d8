"""Ranks that do nothing: light actors with a worker's interface, and a pool without any actors.

The processes of the actors load no torch, so that sixteen of them fit on two cores.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray

from flexray.actors.seat import JoinReport, Left, Seat
from flexray.actors.work import MicroReport, RankStep, StepReport

STEP_S = 0.5  # that a stub sleeps
TOKENS = 500  # that it says a row has


def made_up(work: RankStep, rank: int, step_ms: float, idle_ms: float) -> StepReport:
    """A report of `work`, as a rank would send it. Micro-steps take a multiple of their rows."""
    micro_steps = tuple(
        MicroReport(
            degree=len(part.ranks),
            tokens=TOKENS * len(part.rows),
            squares=TOKENS**2 * len(part.rows),
            sequences=len(part.rows),
            forward_ms=3.0 * len(part.rows),
            backward_ms=6.0 * len(part.rows),
            own_work_ms=8.0 * len(part.rows) / len(part.ranks),
            all_to_all_ms=0.5 * len(part.rows) * (len(part.ranks) > 1),
            wait_ms=0.5 * len(part.rows),
        )
        for part in work.micro_steps
    )
    return StepReport(
        step=work.step,
        generation=work.generation,
        rank=rank,
        loss=1.0,
        gradient_norm=1.0,
        learning_rate=1e-3,
        skipped=False,
        micro_steps=micro_steps,
        new_communicators=sum(change.create and rank in change.ranks for change in work.changes),
        step_ms=step_ms,
        snapshot_ms=0.0,
        idle_ms=idle_ms,
        peak_memory_mb=0.0,
        tells_memory=False,
    )


@ray.remote(max_restarts=0, concurrency_groups={"train": 1, "control": 1, "storage": 1})
class StubWorker:
    """A rank that sleeps for every step and keeps nothing."""

    def __init__(self) -> None:
        self.rank = 0
        self.ended: float | None = None

    @ray.method(concurrency_group="control")
    def place(self, shared: object = None) -> Any:
        """Like a worker's `Place`, which would load torch."""
        return SimpleNamespace(
            pid=os.getpid(),
            node=ray.get_runtime_context().get_node_id(),
            gpu="",
            device_name="",
            memory_mb=1024.0,
            cores=os.cpu_count() or 1,
            is_blind=False,
        )

    @ray.method(concurrency_group="control")
    def pulse(self) -> None:
        """Answers."""

    @ray.method(concurrency_group="control")
    def abort(self) -> None:
        """Nobody waits for anybody."""

    @ray.method(concurrency_group="train")
    def join(self, seat: Seat) -> JoinReport:
        """Takes a seat."""
        self.rank = seat.rank
        return JoinReport(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)

    @ray.method(concurrency_group="train")
    def step(self, work: RankStep) -> StepReport:
        """Sleeps, and tells how long it had nothing to do before."""
        began = time.perf_counter()
        idle_s = 0.0 if self.ended is None else began - self.ended
        time.sleep(STEP_S)
        self.ended = time.perf_counter()
        return made_up(work, self.rank, (self.ended - began) * 1e3, idle_s * 1e3)

    @ray.method(concurrency_group="train")
    def settle(self, step: int) -> None:
        """Nothing is copied."""

    @ray.method(concurrency_group="train")
    def leave(self) -> Left:
        """Nothing is held."""
        return Left((), False)

    @ray.method(concurrency_group="train")
    def save(self, location: str) -> Any:
        """Like a worker's `SaveReport`, of an empty folder."""
        Path(location).mkdir(parents=True, exist_ok=True)
        return SimpleNamespace(counters={}, blocked_s=0.0)

    @ray.method(concurrency_group="storage")
    def written(self) -> str:
        """Nothing had to be."""
        return ""


@dataclass(frozen=True)
class StubActors:
    """What a crew makes actors of. Settings and data stay here: reading them loads torch."""

    actors: Any = StubWorker

    def options(self, **options: Any) -> StubActors:
        """As of a Ray actor class."""
        return StubActors(self.actors.options(**options))

    def remote(self, *_: object) -> Any:
        """Starts one."""
        return self.actors.remote()


class NoActors:
    """A pool whose ranks are not there: work is serialised for each, and made-up reports read.

    `made_up_s`: CPU time that making up reports took, which is no driver's work; `carried_s`: that
    serialising both took.
    """

    def __init__(self) -> None:
        self.made_up_s = self.carried_s = 0.0

    def dispatch(self, work: Sequence[RankStep]) -> list[bytes]:
        """The reports of each rank's part, as they would come in."""
        began = time.thread_time()
        for part in work:
            pickle.dumps(part)
        sent = time.thread_time()
        reports = [pickle.dumps(made_up(part, r, 2000.0, 1.0)) for r, part in enumerate(work)]
        self.carried_s += sent - began
        self.made_up_s += time.thread_time() - sent
        return reports

    def is_busy(self, calls: Sequence[bytes]) -> bool:
        """Never: reports are there at once."""
        return False

    def wait(self, calls: Sequence[bytes], what: str) -> list[Any]:
        """Reads them."""
        began = time.thread_time()
        reports = [pickle.loads(call) for call in calls]
        self.carried_s += time.thread_time() - began
        return reports

    def settle(self, step: int) -> None:
        """Nothing is copied."""
