"""Small instances against exhaustive search: bound <= optimum <= plan, and the plan is near."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest

from flexray.solver.bound import tightened
from flexray.solver.cluster import Cluster
from flexray.solver.cost import CostModel
from flexray.solver.planner import Effort, plan_step

EFFORT = Effort(evaluations=1_000_000)


def optimum(lengths: list[int], cost: CostModel, gpus: int, degrees: list[int]) -> float:
    """The shortest step on one node, over all partitions into micro-steps and groups."""
    options = cost.options(Cluster((gpus,)), degrees)
    everything = (1 << len(lengths)) - 1

    @cache
    def group_ms(rows: int, j: int) -> float:
        o, chosen = options[j], [s for k, s in enumerate(lengths) if rows >> k & 1]
        if sum(chosen) > o.capacity:
            return math.inf
        return o.fixed + sum(o.quadratic * s**2 + o.linear * s + o.per_sequence for s in chosen)

    @cache
    def micro_step_ms(rows: int, free: int) -> float:
        if not rows:
            return 0.0
        best = math.inf
        for part in parts(rows):
            for j, option in enumerate(options):
                if option.degree <= free:
                    rest = micro_step_ms(rows & ~part, free - option.degree)
                    best = min(best, max(group_ms(part, j), rest))
        return best

    @cache
    def step_ms(rows: int) -> float:
        if not rows:
            return 0.0
        return min(
            micro_step_ms(part, gpus) + cost.micro_step_ms + step_ms(rows & ~part)
            for part in parts(rows)
        )

    def parts(rows: int):
        """Subsets that hold the lowest row."""
        lowest = rows & -rows
        part = rows
        while part:
            if part & lowest:
                yield part
            part = (part - 1) & rows

    return step_ms(everything)


def instance(seed: int) -> tuple[list[int], CostModel, int, list[int]]:
    rng = np.random.default_rng(seed)
    gpus = int(rng.integers(1, 5))
    degrees = sorted({1, *rng.choice([1, 2, 3, 4], 3).tolist()})
    lengths = np.maximum(1, rng.lognormal(4, 1.2, rng.integers(1, 8)).astype(int))
    largest = max(d for d in degrees if d <= gpus)
    capacity = max(-(-int(lengths.max()) // largest), int(rng.integers(50, 500)))
    cost = CostModel(
        quadratic=float(rng.choice([0.0, 1e-3, 1e-2])),
        linear=float(rng.uniform(0.05, 1)),
        per_sequence=float(rng.choice([0.0, 3.0])),
        micro_step_ms=float(rng.choice([0.0, 5.0, 50.0])),
        exchange_mb_per_token=1.0,
        exchange_ms=float(rng.choice([0.0, 4.0])),
        bandwidth=((2, float(rng.uniform(1, 10))), (4, float(rng.uniform(1, 10)))),
        tokens_per_gpu=capacity,
    )
    return lengths.tolist(), cost, gpus, degrees


@pytest.mark.parametrize("block", range(8))
def test_bounds_are_below_and_plan_is_near_the_optimum(block: int) -> None:
    ratios = []
    for seed in range(block * 15, block * 15 + 15):
        lengths, cost, gpus, degrees = instance(seed)
        best = optimum(lengths, cost, gpus, degrees)
        plan = plan_step(lengths, cost, Cluster((gpus,)), degrees, effort=EFFORT)
        assert plan.lower_bound_ms <= best * (1 + 1e-9), seed
        assert plan.planned_ms >= best * (1 - 1e-9), seed
        ratios.append(plan.planned_ms / best)
        tight = tightened(plan, lengths, cost, Cluster((gpus,)), degrees)
        assert plan.lower_bound_ms <= tight.lower_bound_ms <= best * (1 + 1e-9), seed
    assert np.mean(ratios) < 1.02, sorted(ratios)
