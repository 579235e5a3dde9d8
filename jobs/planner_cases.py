"""What the planner's benchmark runs: planning problems, ways to plan them, results kept on disk."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from flexray.presets import load_preset
from flexray.solver import baselines
from flexray.solver.bound import tightened
from flexray.solver.cluster import Cluster
from flexray.solver.flexsp import flexsp
from flexray.solver.plan import Plan
from flexray.solver.planner import AT_ONCE, Effort, plan_step
from flexray.solver.verify import verify

Result = dict[str, Any]

LENGTHS = Path(__file__).parents[1] / "datasets" / "lengths"
SOLVER = Path(__file__).parents[1] / "solver"
BATCH, PAD = 512, 128
DEGREES = (1, 2, 4, 8, 16, 32, 64)
DATA = ("wikipedia", "github")
BATCHES = range(3, 33)  # the paper skips the first three
MODELS = ("gpt-7b-a100-40g", "gpt-13b-a100-40g", "gpt-30b-a100-40g")
LIMITS = (192_000, 384_000)

# Planned ms of FlexSP's official solver, SCIP limit 60 s a micro-step: gpt-7b, 64 A100-40GB, 192K,
# lengths rounded up to 128, degrees from 2.
OFFICIAL = {
    "wikipedia": {3: 3342.11, 4: 3486.29, 5: 3308.64, 6: 4769.21, 7: 2954.18, 8: 4937.64},
    "github": {3: 9000.00, 4: 9815.92, 5: 9413.02, 6: 8525.73},
}

FLEXRAY = "flexray"
EFFORTS = {
    "flexray, at once": AT_ONCE,
    "flexray, search only": Effort(nodes=0),
    FLEXRAY: Effort(),
    "flexray, twenty times the effort": Effort(evaluations=300_000_000, nodes=50, guard_s=20.0),
}
BASELINES: dict[str, Callable[..., Plan]] = {
    "static": baselines.static,
    "batch-adaptive": baselines.batch_adaptive,
    "Megatron-style greedy": baselines.megatron_greedy,
    "Karmarkar-Karp": baselines.karmarkar_karp,
    "FlexSP two-stage": flexsp,
}
SLOW = ("FlexSP two-stage", "flexray, twenty times the effort")
# The best plan that ten minutes over the official solver's batches of one data set find.
LONG, LONG_S = "flexray, ten minutes", 600.0
# CPU time that the tight bound may take.
BOUNDS = {"tight bound, quick": 8.0, "tight bound": 60.0}


@dataclass(frozen=True)
class Case:
    """One batch on one cluster, and a way to plan it.

    `padded` lengths are rounded up to 128, as the official solver does.
    """

    data: str
    batch: int
    method: str = FLEXRAY
    first_degree: int = 1
    padded: bool = False
    preset: str = MODELS[0]
    limit: int = LIMITS[0]
    gpus: int = 64
    sequences: int = BATCH

    @property
    def key(self) -> str:
        """Names the result; plans and bounds are made again when their own source has changed."""
        source = BOUND_SOURCE if self.method in BOUNDS else PLAN_SOURCE
        return repr(self) + ("" if self.method in BASELINES else version_of(source))

    def lengths(self) -> list[int]:
        """Lengths of the batch, (sequences,): 512 rows after over-long ones are left out."""
        column = pq.read_table(LENGTHS / f"{self.data}.parquet")["length"].to_numpy()
        column = column.astype(np.int64)
        padded = -(-column // PAD) * PAD
        kept = (padded if self.padded else column)[padded <= self.longest]
        first = self.batch * self.sequences
        return [int(n) for n in kept[first : first + self.sequences]]

    @property
    def longest(self) -> int:
        """Tokens of the longest row that the paper admits."""
        return self.limit - PAD

    def run(self) -> Result:
        """Plans and verifies, or bounds."""
        preset = load_preset(self.preset).with_max_length(self.limit)
        # Other cluster sizes keep what a GPU holds, so that only the size changes.
        cost = preset.cost.with_capacity(preset.cost.capacity(64))
        cluster, lengths = Cluster.uniform(self.gpus), self.lengths()
        degrees = [d for d in DEGREES if d >= self.first_degree]
        wall, cpu = time.perf_counter(), time.process_time()
        if self.method in BOUNDS:
            plan = plan_step(lengths, cost, cluster, degrees)
            limit_s = BOUNDS[self.method]
            plan = tightened(plan, lengths, cost, cluster, degrees, limit_s=limit_s)
        elif self.method == LONG:
            ends = cpu + LONG_S / len(OFFICIAL[self.data])
            plan = min(_longer(ends, lengths, cost, cluster, degrees), key=lambda p: p.planned_ms)
        elif self.method in EFFORTS:
            plan = plan_step(lengths, cost, cluster, degrees, effort=EFFORTS[self.method])
        elif self.method == "static":
            plan = baselines.static(lengths, cost, cluster, degrees, self.longest)
        else:
            plan = BASELINES[self.method](lengths, cost, cluster, degrees)
        result = {
            "planned_ms": plan.planned_ms,
            "wall_s": time.perf_counter() - wall,
            "cpu_s": time.process_time() - cpu,
            "bound_ms": plan.lower_bound_ms,
            "groups": plan.summary,
            "method": plan.method,
        }
        verify(plan, lengths, cost, cluster, degrees)
        return result


def _longer(ends: float, *step: Any) -> Iterator[Plan]:
    """Plans of ever more effort, each another annealing, until CPU time is `ends`."""
    evaluations = Effort().evaluations
    while time.process_time() < ends:
        yield plan_step(*step, effort=Effort(evaluations, nodes=50, guard_s=10.0))
        evaluations += evaluations // 10


BOUND_SOURCE = ("bound.py", "joint.py")
NO_PLANNING = ("bound.py", "calibration.py", "memory.py", "prediction.py")
PLAN_SOURCE = tuple(sorted({path.name for path in SOLVER.glob("*.py")} - {*NO_PLANNING}))


@cache
def version_of(source: tuple[str, ...]) -> str:
    """A hash of files of the planner."""
    return hashlib.sha256(b"".join((SOLVER / name).read_bytes() for name in source)).hexdigest()[
        :12
    ]


def table_cases(*methods: str) -> Iterator[Case]:
    """The batches that the official solver was run on, with its lengths and with the true ones."""
    for data, official in OFFICIAL.items():
        for batch in official:
            for padded in (True, False):
                for first in (2, 1):
                    for method in methods:
                        yield Case(data, batch, method, first, padded)


def long_cases() -> Iterator[Case]:
    """The official solver's batches and lengths, as well as ten minutes can plan them."""
    yield from (case for case in table_cases(LONG) if case.padded)


def method_cases(batches: Iterable[int], slow: bool) -> Iterator[Case]:
    """Every method on the same batches: true lengths, degrees from 1."""
    for batch in batches:
        for data in DATA:
            for method in (*BASELINES, *EFFORTS):
                if slow or method not in SLOW:
                    yield Case(data, batch, method)


def gap_cases(bound: str, batches: Iterable[int]) -> Iterator[Case]:
    """FlexRay's plans and tight bounds."""
    for batch in batches:
        for data in DATA:
            for method in (FLEXRAY, bound):
                yield Case(data, batch, method)


GPUS, SEQUENCES = (16, 64, 256, 1024), (128, 512, 2048, 8192)


def growth_cases() -> Iterator[Case]:
    """Cluster and batch sizes."""
    for gpus in GPUS:
        for sequences in SEQUENCES:
            yield Case("wikipedia", 0, gpus=gpus, sequences=sequences)


PAPER_METHODS = ("static", "batch-adaptive", "FlexSP two-stage", FLEXRAY)


def paper_cases(batches: Iterable[int], slow: bool) -> Iterator[Case]:
    """The paper's models, data and limits; its lengths; FlexSP without degree 1, as published."""
    for batch in batches:
        for preset in MODELS:
            for limit in LIMITS:
                for data in DATA:
                    for method in PAPER_METHODS:
                        if slow or method not in SLOW:
                            yield paper_case(data, limit, preset, method, batch)


def paper_case(data: str, limit: int, preset: str, method: str, batch: int) -> Case:
    """One batch of one cell of the paper's table."""
    first = 1 if method == FLEXRAY else 2
    return Case(data, batch, method, first, True, preset, limit)


class Results:
    """Results by case, one JSON line each, written as soon as they are there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self._by_key: dict[str, Result] = {e["case"]: e for e in map(json.loads, lines)}

    def __contains__(self, case: Case) -> bool:
        return case.key in self._by_key

    def __getitem__(self, case: Case) -> Result:
        return self._by_key[case.key]

    def run(self, case: Case) -> None:
        """Runs a case that has no result yet."""
        if case in self:
            return
        entry = {"case": case.key} | case.run()
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        self._by_key[case.key] = entry
