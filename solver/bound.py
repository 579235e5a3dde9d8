"""Lower bounds: how good a plan could be at best.

`cheap_bound` is there at once; `tight_bound` takes seconds and is meant to run behind the plan.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from flexray.solver.cluster import Cluster
from flexray.solver.cost import CostModel
from flexray.solver.joint import JointModel, bucketed
from flexray.solver.plan import Plan
from flexray.solver.problem import Problem

# Levels of time, sequences counted one by one, buckets of the others: first a model that is soon
# solved, then one that is closer to the truth, with levels around the plan's micro-steps.
LEVELS = 10
COARSE, FINE = (24, 40), (40, 60)
AROUND = (0.97, 0.985, 1.0)
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
    limit_s: float = 20.0,
) -> Plan:
    """The plan with a tighter lower bound: never a lower one, and never above the plan.

    Args:
        nodes: branch-and-bound nodes of each of two models, a coarse and a fine one.
        limit_s: CPU time of both together.
    """
    if not plan.micro_steps:
        return plan
    problem = Problem.of(lengths, cost, cluster, degrees)
    made = [step.planned_ms - problem.micro_step_ms for step in plan.micro_steps]
    bound = tight_bound(problem, made, nodes, limit_s)
    return replace(plan, lower_bound_ms=min(plan.planned_ms, max(plan.lower_bound_ms, bound)))


def tight_bound(problem: Problem, made: Sequence[float], nodes: int, limit_s: float) -> float:
    """ms that no plan of the step is under: the joint model's dual bound.

    Args:
        made: ms of the micro-steps of some plan, without `problem.micro_step_ms`.
        nodes: branch-and-bound nodes of each model.
        limit_s: CPU time, at most half of it for the coarse model.

    Valid because everything in the model is at most what a plan no longer than `made` needs. Every
    micro-step lies in some level (the top one is what the known time leaves for one micro-step
    beside the fixed costs of the fewest), there are at most known / micro_step_ms micro-steps (at
    most one a sequence if they cost nothing), and every bucket is counted at its shortest length.
    Any choice of levels is valid; these are dense where the longest sequence's time is and, in the
    fine model, where `made` is.
    """
    known_ms = math.fsum(made) + len(made) * problem.micro_step_ms
    ends = time.process_time() + limit_s
    coarse = _dual_bound(problem, known_ms, COARSE, [], nodes, limit_s / 2)
    around = [ms * near for ms in made for near in AROUND]
    left = ends - time.process_time()
    return max(coarse, _dual_bound(problem, known_ms, FINE, around, nodes, left))


def _dual_bound(
    problem: Problem,
    known_ms: float,
    size: tuple[int, int],
    around: Sequence[float],
    nodes: int,
    limit_s: float,
) -> float:
    """Of one model: `size` is sequences counted one by one, and buckets of the others."""
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
            around,
        ]
    )
    high = np.append(np.unique(levels[(levels > 0) & (levels < top)]), top)
    low = np.append(0.0, high[:-1])
    buckets = bucketed(problem, *size, shortest=True)
    # Large groups in integers: half of a group that fills the cluster is no group.
    model = JointModel(problem, buckets, low, high, most, whole_from=8)
    return model.solve(nodes, 10 * limit_s, gap=5e-4, cpu_s=limit_s).bound * (1 - TOLERANCE)
