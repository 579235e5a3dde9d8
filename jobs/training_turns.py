"""One run in which every batch is trained once by each way to plan it, one after the other.

The ways share the process, the ranks, their communicators and the cost model that is learned from
all of them, so that a machine that is slow for a while is slow for all.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import ray
from rich.console import Console

from flexray.batches import Batch, batches
from flexray.callbacks import Callback, Callbacks
from flexray.checkpoints import Checkpoint
from flexray.config import load_config
from flexray.display import Display
from flexray.driver import Driver
from flexray.events import GenerationEvent, StepEvent
from flexray.ledger import Ledger
from flexray.planning_tasks import PlanRequest
from flexray.prefetch import PlannedBatch, Prefetch
from flexray.preparation import prepare
from flexray.run_directory import RunDirectory
from flexray.solver.baselines import batch_adaptive, static
from flexray.solver.calibration import Calibrator
from flexray.solver.cost import CostModel
from flexray.solver.plan import Plan
from flexray.solver.planner import plan_step
from flexray.solver.prediction import predicted_ms
from flexray.stopping import StopRequest

FLEXRAY, STATIC, ADAPTIVE, UNAWARE = "flexray", "static", "adaptive", "unaware"


@dataclass(frozen=True)
class Turn:
    """One step of the run: which batch of the corpus's order, and how it is planned."""

    batch: int
    way: str


@dataclass(frozen=True)
class Step:
    """What one turn took.

    Attributes:
        wall_s: from the end of the step before to the end of this one, as the driver hears of them.
        planned_s: as the plan said that was trained by.
        speeds: of the ranks, as the plan took them to be.
    """

    turn: Turn
    wall_s: float
    planned_s: float
    speeds: tuple[float, ...]


@dataclass(frozen=True)
class Run:
    """All steps, and the cost model that they ended with."""

    steps: tuple[Step, ...]
    cost: CostModel


def train(
    folder: Path,
    name: str,
    sections: dict[str, Any],
    turns: Sequence[Turn],
    worker: Any,
    start: CostModel | None = None,
) -> Run:
    """Trains `turns` with actors of class `worker`, under a config of these sections.

    `start`: the cost model that the first plans are made with, instead of an estimate. What is
    shown goes to a file beside the run's folder. Raises UserError, CorpusError, PlanningError and
    RunFailed.
    """
    fixed = {
        "run": {"dir": folder, "name": name},
        "checkpoint": {"every": None},
        "tracking": {"wandb": "disabled"},
        "train": sections["train"] | {"steps": len(turns)},
    }
    config = load_config(sections | fixed, [])
    clock = Clock()
    run = RunDirectory.create(folder, name)
    with (
        (folder / f"{name}.log").open("w") as log,
        Display(Console(file=log, width=200)) as display,
    ):
        driver = InTurns(turns, worker, prepare(config), run, display, Callbacks([clock]), start)
        driver.train()
    shutil.rmtree(run.path / "checkpoints")  # nobody goes on from it
    walls = [after - before for before, after in pairwise(clock.ends)]
    steps = tuple(
        Step(turn, wall_s, event.planned_s, planned.request.cluster.speed)
        for turn, wall_s, event, planned in zip(
            turns, walls, clock.events, driver.planned, strict=True
        )
    )
    return Run(steps, driver.calibrator.cost)


class InTurns(Driver):
    """Deals the batches of `turns`, and has each planned its way."""

    def __init__(
        self,
        turns: Sequence[Turn],
        worker: Any,
        job: Any,
        run: Any,
        display: Any,
        callbacks: Any,
        start: CostModel | None,
    ) -> None:
        """`worker`: the actors' class; `start`: as of `train`; the rest as for every driver."""
        self.turns, self.worker, self.start = turns, worker, start
        self.planned: list[PlannedBatch] = []
        longest = int(job.documents.lengths.max())
        self.planning = partial(EachItsWay, turns, longest, self.planned)
        super().__init__(job, run, display, callbacks=callbacks, stop=StopRequest())

    def _initialize(self, device: str) -> None:
        super()._initialize(device)
        if self.start:
            self.calibrator = Calibrator(self.start, ())

    def _ledger_after(self, checkpoint: Checkpoint | None) -> Ledger:
        most = max(turn.batch for turn in self.turns) + 1
        dealt = list(islice(batches(self.job.documents, self.config.train), most))
        return Ledger(
            replace(dealt[turn.batch], step=step) for step, turn in enumerate(self.turns, 1)
        )


class EachItsWay(Prefetch):
    """Plans each step's batch as its turn says, and keeps what was planned."""

    def __init__(
        self,
        turns: Sequence[Turn],
        longest: int,
        planned: list[PlannedBatch],
        *args: Any,
        **kw: Any,
    ) -> None:
        """`longest`: sequence of the corpus, which the static degree is to hold."""
        self._turns, self._longest, self._planned = turns, longest, planned
        self._ways = tuple(sorted({turn.way for turn in turns}))
        super().__init__(*args, **kw)

    def __next__(self) -> PlannedBatch:
        planned = super().__next__()
        self._planned.append(planned)
        return planned

    def plan(self, batch: Batch, request: PlanRequest) -> Any:
        """The plan of this batch's turn."""
        way = self._turns[batch.step - 1].way
        return plan_its_way.remote(batch.lengths, request, self._longest, self._ways, way)


@ray.remote(num_cpus=0)
def plan_its_way(
    lengths: tuple[int, ...], request: PlanRequest, longest: int, ways: Sequence[str], way: str
) -> tuple[Plan, float]:
    """The plan of `way`, and ms at the best single degree.

    All `ways` are planned, so that whatever a step's own is, as much planning runs beside it.
    """
    plans = {each: planned(lengths, request, longest, each) for each in {*ways, ADAPTIVE}}
    return plans[way], plans[ADAPTIVE].planned_ms


def planned(lengths: Sequence[int], request: PlanRequest, longest: int, way: str) -> Plan:
    """A batch's plan. `longest`: of the corpus."""
    cost, cluster, degrees = request.cost, request.cluster, request.degrees
    if way == STATIC:
        return static(lengths, cost, cluster, degrees, longest)
    if way == ADAPTIVE:
        return batch_adaptive(lengths, cost, cluster, degrees)
    if way == FLEXRAY:
        return plan_step(lengths, cost, cluster, degrees, cached=request.cached)
    alike = replace(cluster, speeds=())
    plan = plan_step(lengths, cost, alike, degrees, cached=request.cached)
    return replace(plan, planned_ms=predicted_ms(plan, cost, cluster))  # what it will really take


class Clock(Callback):
    """When each step ended, after when the ranks were there."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.events: list[StepEvent] = []

    def on_generation(self, event: GenerationEvent) -> None:
        """The run begins."""
        self.ends.append(time.perf_counter())

    def on_step(self, event: StepEvent) -> None:
        """A step has ended on all ranks."""
        self.ends.append(time.perf_counter())
        self.events.append(event)
