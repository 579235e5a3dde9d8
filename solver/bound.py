"""Lower bounds: how good a plan could be at best.

`cheap_bound` is there at once; `tight_bound` takes seconds and is meant to run behind the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from flexray.solver.cluster import Cluster
from flexray.solver.cost import CostModel
from flexray.solver.joint import JointModel, bucketed
from flexray.solver.plan import Plan
from flexray.solver.problem import Problem

# Levels of time, sequences counted one by one, buckets of the others.
LEVELS, ALONE, BUCKETS = 20, 24, 40
# HiGHS works to tolerances of 1e-6 to 1e-7.
TOLERANCE = 1e-5


def cheap_bound(problem: Problem) -> float:
    """ms that no plan of the step is under, at once: work, memory and the longest sequence.

    The groups of a micro-step of time C hold at most C x (sum of speeds) of GPU work, so all
    micro-steps together last at least the least work of all sequences over that; and one of them
    holds the longest sequence. There are at least as many micro-steps as memory demands.
    """
    if not len(problem.lengths):
        return 0.0
    work = problem.work.min(axis=1).sum() / problem.power
    longest = (problem.time + problem.fixed).min(axis=1).max() / max(problem.cluster.speed)
    return float(max(work, longest) + problem.fewest_micro_steps * problem.micro_step_ms)


def tightened(
    plan: Plan,
    lengths: Sequence[int],
    cost: CostModel,
    cluster: Cluster,
    degrees: Iterable[int],
    *,
    nodes: int = 2000,
    guard_s: float = 20.0,
) -> Plan:
    """The plan with a tighter lower bound: never a lower one, and never above the plan."""
    if not plan.micro_steps:
        return plan
    problem = Problem.of(lengths, cost, cluster, degrees)
    bound = tight_bound(problem, plan.planned_ms, nodes, guard_s)
    return replace(plan, lower_bound_ms=min(plan.planned_ms, max(plan.lower_bound_ms, bound)))


def tight_bound(problem: Problem, known_ms: float, nodes: int, guard_s: float) -> float:
    """ms that no plan of the step is under: the joint model's dual bound.

    Args:
        known_ms: time of some plan.

    Valid because everything in the model is at most what a plan of at most `known_ms` needs. Every
    micro-step lies in some level (the top one is what `known_ms` leaves for one micro-step beside
    the fixed costs of the fewest), there are at most known_ms / micro_step_ms micro-steps (at most
    one a sequence if they cost nothing), and every bucket is counted at its shortest length. Any
    choice of levels is valid; these are dense where the longest sequence's time is.
    """
    known_ms *= 1 + TOLERANCE
    fixed = problem.micro_step_ms
    top = known_ms - problem.fewest_micro_steps * fixed
    most = len(problem.lengths)
    if fixed * most > known_ms:
        most = int(known_ms / fixed)
    longest = (problem.time[0] + problem.fixed) / max(problem.cluster.speed)
    longest = longest[np.isfinite(longest)]
    work = problem.work.min(axis=1).sum() / problem.power
    share = max(work, float(longest.min())) / problem.fewest_micro_steps
    levels = np.concatenate(
        [
            np.geomspace(share * 0.05, share * problem.fewest_micro_steps * 1.2, LEVELS),
            longest * (1 - 1e-9),
            longest * (1 + 1e-9),
        ]
    )
    high = np.append(np.unique(levels[(levels > 0) & (levels < top)]), top)
    low = np.append(0.0, high[:-1])
    buckets = bucketed(problem, ALONE, BUCKETS, shortest=True)
    # Large groups in integers: half of a group that fills the cluster is no group.
    model = JointModel(problem, buckets, low, high, most, whole_from=8)
    return model.solve(nodes, guard_s, gap=5e-4).bound * (1 - TOLERANCE)
