"""The driver's own work a step: with light actors, and with made-up reports of many more ranks."""

from __future__ import annotations

import cProfile
import pstats
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import islice, pairwise
from pathlib import Path
from statistics import median, quantiles
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from rich.console import Console

from flexray.actors.pool import Generation
from flexray.batches import Batch, batches
from flexray.callbacks import Callbacks
from flexray.checkpoints import Checkpoint
from flexray.config import Config, load_config
from flexray.display import Display
from flexray.driver import Driver
from flexray.jobs.driver_stubs import NoActors, StubActors
from flexray.journal import Journal
from flexray.ledger import Done, Ledger
from flexray.nonfinite import NonfinitePolicy
from flexray.planning_tasks import PlanRequest
from flexray.prefetch import PlannedBatch
from flexray.preparation import prepare
from flexray.run_directory import RunDirectory
from flexray.solver.calibration import WINDOW, Calibrator
from flexray.solver.cluster import Cluster
from flexray.solver.communicators import CommunicatorCache
from flexray.solver.cost import CostModel
from flexray.solver.planner import AT_ONCE, plan_step
from flexray.step_loop import StepLoop
from flexray.stopping import StopRequest

WARM = 5  # steps that are left out
SEQUENCES = 4  # of a batch, for each rank
# Groups of 64 at most, as on GPUs; all-to-alls cost enough that short rows get small ones.
DEGREES = (1, 2, 4, 8, 16, 32, 64)
STUB_COST = CostModel(
    1e-6, 0.016, micro_step_ms=10.0, exchange_mb_per_token=1.0, bandwidth=((8, 100.0), (16, 10.0))
).with_capacity(4096)


@dataclass(frozen=True)
class Real:
    """With light actors. ms a step.

    Attributes:
        idle: of the rank that had nothing to do for the longest, between two steps: the median
            over steps, and what 95% of them do not exceed.
        cpu: of the driver's process, Ray's threads included, the median over steps.
        main: of that, the thread that runs the loop.
    """

    ranks: int
    steps: int
    idle: tuple[float, float]
    cpu: float
    main: float


@dataclass(frozen=True)
class Stubbed:
    """With made-up reports. ms a step of the one thread that works, means.

    Attributes:
        fit: of the cost model, before each plan.
        carried: slices are serialised, reports read.
        rest: slices, records, the newest reports taken in, what is written and shown.
    """

    ranks: int
    steps: int
    fit: float
    carried: float
    rest: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.fit + self.carried + self.rest


def with_actors(
    folder: Path, ranks: int, steps: int, profile: cProfile.Profile | None = None
) -> Real:
    """Trains nothing on `ranks` light actors. `profile`: records the driver's loop."""
    config = _config(folder, f"actors-{ranks}", ranks, WARM + steps)
    run = RunDirectory.create(folder, f"actors-{ranks}")
    with (
        (folder / f"actors-{ranks}.log").open("w") as log,
        Display(Console(file=log, width=200)) as display,
    ):
        driver = Watched(prepare(config), run, display, stop=StopRequest())
        driver.profile_of_loop = profile
        driver.train()
    ledger = cast(WatchedLedger, driver.ledger)
    return real_of(ranks, ledger.clocks[WARM:], ledger.idle_ms[WARM + 1 :])


def real_of(ranks: int, clocks: list[tuple[float, float]], idle_ms: list[float]) -> Real:
    """From (process, thread) CPU seconds at the end of each step, and its longest idling."""
    cpu, main = (
        median(1e3 * (after[i] - before[i]) for before, after in pairwise(clocks)) for i in (0, 1)
    )
    worst = quantiles(idle_ms, n=20, method="inclusive")[-1]
    return Real(ranks, len(idle_ms), (median(idle_ms), worst), cpu, main)


def with_reports(folder: Path, ranks: int, steps: int) -> Stubbed:
    """A generation's loop over batches of so many ranks, all of them made up."""
    name = f"reports-{ranks}"
    config = _config(folder, name, ranks, WINDOW + steps)
    run = RunDirectory.create(folder, name)
    pool, fits = NoActors(), _Fits(ranks, WINDOW + steps)
    places = tuple(SimpleNamespace(node=f"n{r // 8}", pid=r, gpu="") for r in range(ranks))
    with (
        (folder / f"{name}.log").open("w") as log,
        Display(Console(file=log, width=200)) as display,
        Journal(config, run, display, Callbacks(), None) as journal,
    ):
        idle: Any = SimpleNamespace(
            step=None, poll=lambda done: [], before=id, after=id, done=lambda step: None
        )
        loop = StepLoop(
            cast(Any, pool),
            Generation(1, cast(Any, places)),
            (),
            CommunicatorCache(16),
            ledger=fits.ledger,
            journal=journal,
            saver=idle,
            profiler=idle,
            nonfinite=NonfinitePolicy(3),
            calibrator=fits.calibrator,
            state_after=cast(Any, None),
            save_every=None,
            copy_every=1,
        )
        planned = fits.planned()
        loop.prefetch = islice(planned, WINDOW)  # from then on a fit has as much to do as ever
        loop.run(lambda: False)
        pool.made_up_s = pool.carried_s = fits.spent_s = 0.0
        began = time.thread_time()
        loop.prefetch = planned
        loop.run(lambda: False)
        spent = time.thread_time() - began - pool.made_up_s
    each = 1e3 / steps
    rest = spent - fits.spent_s - pool.carried_s
    return Stubbed(ranks, steps, fits.spent_s * each, pool.carried_s * each, rest * each)


def calls_ms(real: Sequence[Real], stubbed: Sequence[Stubbed]) -> float:
    """CPU ms a step that a further rank's calls take: what actors cost beyond made-up reports."""
    without = {one.ranks: one.total for one in stubbed}
    ranks = [one.ranks for one in real]
    slope, _ = np.polyfit(ranks, [one.cpu - without[one.ranks] for one in real], 1)
    return max(0.0, float(slope))


def profiled(folder: Path, ranks: int, steps: int) -> str:
    """Where the driver's thread spends its time, the functions that take the longest themselves."""
    profile = cProfile.Profile(time.thread_time)
    with_actors(folder, ranks, steps, profile)
    text = StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(25)
    pstats.Stats(profile, stream=text).sort_stats("cumtime").print_stats("flexray", 45)
    return text.getvalue()


class Watched(Driver):
    """A driver of light actors that keeps what each step cost it."""

    worker = StubActors()
    profile_of_loop: cProfile.Profile | None = None

    def _ledger_after(self, checkpoint: Checkpoint | None) -> Ledger:
        return WatchedLedger(batches(self.job.documents, self.config.train))

    def _run_steps(self) -> Any:
        if self.profile_of_loop is None:
            return super()._run_steps()
        return self.profile_of_loop.runcall(super()._run_steps)


class WatchedLedger(Ledger):
    """CPU time of the process and of the loop's thread at the end of each step."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        super().__init__(batches)
        self.clocks: list[tuple[float, float]] = []
        self.idle_ms: list[float] = []

    def done(self, step: Done) -> None:
        """The next step is done."""
        self.clocks.append((time.process_time(), time.thread_time()))
        self.idle_ms.append(max(report.idle_ms for report in step.reports))
        super().done(step)


class _Fits:
    """Batches with one plan for all, the cost model fitted before each as a driver has it."""

    def __init__(self, ranks: int, steps: int) -> None:
        cluster = Cluster.uniform(ranks)
        rng = np.random.default_rng(0)
        lengths = np.minimum(16_384, rng.lognormal(6, 1.2, SEQUENCES * ranks).astype(int) + 2)
        self._lengths = tuple(lengths.tolist())
        self._plan = plan_step(self._lengths, STUB_COST, cluster, DEGREES, effort=AT_ONCE)
        self._cluster, self.spent_s = cluster, 0.0
        self.calibrator = Calibrator(STUB_COST, range(ranks))
        rows = tuple(range(len(lengths)))
        self.ledger = Ledger(
            Batch(step, rows, self._lengths, int(lengths.sum())) for step in range(1, steps + 1)
        )

    def planned(self) -> Iterator[PlannedBatch]:
        for batch in self.ledger:
            began = time.thread_time()
            self.calibrator.fit()
            self.spent_s += time.thread_time() - began
            model = self.calibrator
            request = PlanRequest(model.cost, self._cluster, DEGREES, (), model.version)
            yield PlannedBatch(batch, self._plan, self._plan.planned_ms, 0.0, request)


def _config(folder: Path, name: str, ranks: int, steps: int) -> Config:
    return load_config(
        {
            "run": {"dir": folder, "name": name},
            "cluster": {"gpus": ranks, "device": "cpu"},
            "model": {"config": {"num_attention_heads": 8, "num_key_value_heads": 8}},
            "train": {"steps": steps, "batch_sequences": SEQUENCES * ranks},
            "planner": {"preset": "cpu"},
            "checkpoint": {"every": None},
            "tracking": {"wandb": "disabled"},
        },
        [],
    )
