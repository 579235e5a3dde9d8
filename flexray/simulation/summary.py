"""From steps to figures: what a simulation says of each strategy."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flexray.simulation.strategies import BASELINE, StepResult


@dataclass(frozen=True)
class StrategySummary:
    """One strategy over all batches.

    Attributes:
        speedup: over `static`: ratio of the mean step times.
        idle, exchange, collectives: shares of all GPUs' time; what is left is compute.
        gap: mean over the batches of step time / lower bound - 1.
        planning_mean_s, planning_p95_s: wall time of the planner, mean and 95th percentile.
    """

    strategy: str
    mean_step_ms: float
    speedup: float
    idle: float
    exchange: float
    collectives: float
    gap: float
    planning_mean_s: float
    planning_p95_s: float

    @property
    def parts_ms(self) -> dict[str, float]:
        """The mean step time by what the GPUs do, in ms; idle last."""
        compute = 1 - self.idle - self.exchange - self.collectives
        shares = {
            "compute": compute,
            "all-to-all": self.exchange,
            "parameter collectives": self.collectives,
            "idle": self.idle,
        }
        return {name: share * self.mean_step_ms for name, share in shares.items()}


def summarise(results: Sequence[StepResult]) -> list[StrategySummary]:
    """Of the same batches under each strategy, `static` among them, on one cluster."""
    bounds: dict[int, float] = defaultdict(float)
    by_strategy: dict[str, list[StepResult]] = defaultdict(list)
    for result in results:
        bounds[result.batch] = max(bounds[result.batch], result.lower_bound_ms)
        by_strategy[result.strategy].append(result)
    baseline = math.fsum(r.planned_ms for r in by_strategy[BASELINE])
    return [_summary(strategy, steps, bounds, baseline) for strategy, steps in by_strategy.items()]


def _summary(
    strategy: str, steps: list[StepResult], bounds: dict[int, float], baseline: float
) -> StrategySummary:
    total = math.fsum(s.planned_ms for s in steps)
    solve_s = [s.solve_s for s in steps]
    return StrategySummary(
        strategy=strategy,
        mean_step_ms=total / len(steps),
        speedup=baseline / total,
        idle=math.fsum(s.idle * s.planned_ms for s in steps) / total,
        exchange=math.fsum(s.exchange * s.planned_ms for s in steps) / total,
        collectives=math.fsum(s.collectives * s.planned_ms for s in steps) / total,
        gap=float(np.mean([s.planned_ms / bounds[s.batch] - 1 for s in steps if s.planned_ms])),
        planning_mean_s=float(np.mean(solve_s)),
        planning_p95_s=float(np.percentile(solve_s, 95)),
    )


def median_and_slowest(steps: Sequence[StepResult]) -> tuple[StepResult, StepResult]:
    """The step of the (lower) median time and the slowest one."""
    ordered = sorted(steps, key=lambda s: (s.planned_ms, s.batch))
    return ordered[(len(ordered) - 1) // 2], ordered[-1]
