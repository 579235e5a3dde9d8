"""Remakes the planner's figures: plans against FlexSP's, bounds, baselines, planning times.

    python -m flexray.jobs.benchmark_planner --quick     the published table's batches, minutes
    python -m flexray.jobs.benchmark_planner             batches 3-32 and FlexSP's two stages, hours

Every result is a line of OUT/results.jsonl, written as soon as it is there; what is there already
is not computed again. OUT/summary.md holds the tables. One process, one thread.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow.parquet as pq
import typer
from rich.progress import track

from flexray.presets import load_preset
from flexray.solver import baselines
from flexray.solver.bound import tightened
from flexray.solver.cluster import Cluster
from flexray.solver.cost import CostModel
from flexray.solver.flexsp import flexsp
from flexray.solver.plan import Plan
from flexray.solver.planner import AT_ONCE, Effort, plan_step, warm
from flexray.solver.verify import verify

LENGTHS = Path(__file__).parents[1] / "datasets" / "lengths"
LONGEST, BATCH, PAD = 192_000 - 128, 512, 128
DEGREES = (1, 2, 4, 8, 16, 32, 64)
# Planned ms of FlexSP's official solver, SCIP limit 60 s a micro-step: gpt-7b, 64 A100, 192K,
# lengths rounded up to 128.
OFFICIAL = {
    "wikipedia": {3: 3342.11, 4: 3486.29, 5: 3308.64, 6: 4769.21, 7: 2954.18, 8: 4937.64},
    "github": {3: 9000.00, 4: 9815.92, 5: 9413.02, 6: 8525.73},
}
# What the sums over those batches were to reach, of the official ones: degrees from 2, from 1.
TARGET = {
    ("wikipedia", 2): 0.925,
    ("wikipedia", 1): 0.905,
    ("github", 2): 0.92,
    ("github", 1): 0.91,
}
EFFORTS = {
    "at once": AT_ONCE,
    "search": Effort(nodes=0),
    "search, joint MILP": Effort(),
    "twenty times the effort": Effort(evaluations=300_000_000, nodes=50, guard_s=20.0),
}


@dataclass(frozen=True)
class Case:
    """One planning problem and a way to plan it."""

    data: str
    batch: int
    padded: bool
    first_degree: int
    method: str
    gpus: int = 64
    sequences: int = BATCH

    def lengths(self) -> list[int]:
        """Lengths of the batch, (sequences,)."""
        column = pq.read_table(LENGTHS / f"{self.data}.parquet")["length"].to_numpy()
        column = column.astype(np.int64)
        padded = -(-column // PAD) * PAD
        kept = (padded if self.padded else column)[padded <= LONGEST]
        first = self.batch * self.sequences
        return kept[first : first + self.sequences].tolist()

    def run(self) -> dict[str, Any]:
        """Plans, verifies, and bounds the plan if it is FlexRay's own."""
        preset = load_preset("gpt-7b-a100-40g")
        # Scaled clusters keep what a GPU holds, so that only the size changes.
        cost = preset.cost.with_capacity(preset.cost.capacity(64))
        cluster, lengths = Cluster.uniform(self.gpus), self.lengths()
        degrees = [d for d in DEGREES if d >= self.first_degree]
        began = time.perf_counter()
        plan = _planners()[self.method](lengths, cost, cluster, degrees)
        seconds = time.perf_counter() - began
        verify(plan, lengths, cost, cluster, degrees)
        result = {"planned_ms": plan.planned_ms, "seconds": seconds, "groups": plan.summary}
        if self.method == "search, joint MILP" and self.gpus == 64 and self.sequences == BATCH:
            began = time.perf_counter()
            result["bound_ms"] = tightened(plan, lengths, cost, cluster, degrees).lower_bound_ms
            result["bound_s"] = time.perf_counter() - began
        return result


def _planners() -> dict[str, Callable[..., Plan]]:
    def with_effort(effort: Effort) -> Callable[..., Plan]:
        return lambda *problem: plan_step(*problem, effort=effort)

    return {name: with_effort(effort) for name, effort in EFFORTS.items()} | {
        "static": _static,
        "batch-adaptive": baselines.batch_adaptive,
        "Megatron greedy": baselines.megatron_greedy,
        "Karmarkar-Karp": baselines.karmarkar_karp,
        "FlexSP two-stage": flexsp,
    }


def _static(lengths: list[int], cost: CostModel, cluster: Cluster, degrees: list[int]) -> Plan:
    return baselines.static(lengths, cost, cluster, degrees, LONGEST)


def cases(quick: bool) -> Iterator[Case]:
    """Everything that the tables need."""
    for data, official in OFFICIAL.items():
        for batch in official if quick else range(3, 33):
            for padded in (True, False):
                for first in (2, 1):
                    yield Case(data, batch, padded, first, "search, joint MILP")
            for method in _planners():
                slow = method in ("FlexSP two-stage", "twenty times the effort")
                if not (quick and slow):
                    yield Case(data, batch, False, 1, method)
    for gpus in (16, 64, 256, 1024):
        for sequences in (128, 512, 2048, 8192):
            yield Case("wikipedia", 0, False, 1, "search, joint MILP", gpus, sequences)


def main(
    out: Annotated[Path, typer.Option(help="Folder of results.")] = Path("runs/planner"),
    quick: Annotated[bool, typer.Option(help="Only the published table's batches.")] = False,
) -> None:
    """Remake the planner's figures."""
    out.mkdir(parents=True, exist_ok=True)
    log = out / "results.jsonl"
    done: dict[str, dict[str, Any]] = {}
    if log.exists():
        for line in log.read_text().splitlines():
            entry = json.loads(line)
            done[entry["case"]] = entry
    warm()
    wanted = list(dict.fromkeys(cases(quick)))
    with log.open("a") as file:
        for case in track([c for c in wanted if repr(c) not in done], description="planning"):
            entry = {"case": repr(case), **case.run()}
            file.write(json.dumps(entry) + "\n")
            file.flush()
            done[repr(case)] = entry
    results = {case: done[repr(case)] for case in wanted}
    text = "\n".join([*_official(results), "", *_methods(results), "", *_growth(results), ""])
    (out / "summary.md").write_text(text)
    typer.echo(text)


def _official(results: dict[Case, dict[str, Any]]) -> Iterator[str]:
    yield "Sums over the batches of FlexSP's official solver (60 s limit), of its planned time:"
    yield ""
    yield "| data | degrees | lengths | ms | of official | target | mean gap to the bound |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for (data, first), target in TARGET.items():
        for padded in (True, False):
            mine = [
                results[Case(data, batch, padded, first, "search, joint MILP")]
                for batch in OFFICIAL[data]
            ]
            total = sum(r["planned_ms"] for r in mine)
            gap = statistics.mean(r["planned_ms"] / r["bound_ms"] - 1 for r in mine)
            lengths = "rounded up to 128" if padded else "true"
            yield (
                f"| {data} | {first}-64 | {lengths} | {total:.0f} "
                f"| {total / sum(OFFICIAL[data].values()):.4f} | {target} | {gap:.2%} |"
            )


def _methods(results: dict[Case, dict[str, Any]]) -> Iterator[str]:
    yield "All batches, true lengths, degrees 1-64:"
    yield ""
    yield "| data | method | mean ms | speed-up over static | median s | 95% s |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for data in OFFICIAL:
        by_method: dict[str, list[dict[str, Any]]] = {}
        for case, result in results.items():
            if (case.data, case.padded, case.first_degree, case.gpus) == (data, False, 1, 64) and (
                case.sequences == BATCH and case.batch
            ):
                by_method.setdefault(case.method, []).append(result)
        static = statistics.mean(r["planned_ms"] for r in by_method["static"])
        for method, mine in by_method.items():
            ms = statistics.mean(r["planned_ms"] for r in mine)
            seconds = [r["seconds"] for r in mine]
            yield (
                f"| {data} | {method} | {ms:.0f} | {static / ms:.2f} "
                f"| {np.median(seconds):.3f} | {np.percentile(seconds, 95):.3f} |"
            )


def _growth(results: dict[Case, dict[str, Any]]) -> Iterator[str]:
    sizes = (128, 512, 2048, 8192)
    yield "Planning time in seconds, Wikipedia lengths:"
    yield ""
    yield "| GPUs | " + " | ".join(f"{n} sequences" for n in sizes) + " |"
    yield "| --- |" + " --- |" * len(sizes)
    for gpus in (16, 64, 256, 1024):
        row = [
            results[Case("wikipedia", 0, False, 1, "search, joint MILP", gpus, n)]["seconds"]
            for n in sizes
        ]
        yield f"| {gpus} | " + " | ".join(f"{s:.2f}" for s in row) + " |"


if __name__ == "__main__":
    typer.run(main)
