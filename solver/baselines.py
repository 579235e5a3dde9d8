"""Plans without FlexRay's planner: what a user would have otherwise, for honest comparison.

Every baseline gives a `Plan` of the same cost model that passes the same verifier.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from flexray.solver import kernels
from flexray.solver.assemble import Draft, assemble
from flexray.solver.bound import cheap_bound
from flexray.solver.cluster import Cluster
from flexray.solver.cost import CostModel
from flexray.solver.plan import Plan, PlanningError
from flexray.solver.problem import Problem


def static(
    lengths: Sequence[int],
    cost: CostModel,
    cluster: Cluster,
    degrees: Iterable[int],
    longest: int | None = None,
) -> Plan:
    """One degree for the whole run: the smallest that holds its longest sequence.

    Args:
        longest: longest sequence of the run; that of this batch by default.

    Sequences go best-fit into packs of a group's capacity, packs of like time side by side.
    """
    problem = Problem.of(lengths, cost, cluster, degrees)
    most = max(longest or 0, *problem.lengths[:1].tolist(), 0)
    for j, option in enumerate(problem.options):
        if option.capacity >= most:
            return one_degree(problem, j, "static")
    raise PlanningError(f"no group holds {most} tokens: allow a larger degree")


def batch_adaptive(
    lengths: Sequence[int], cost: CostModel, cluster: Cluster, degrees: Iterable[int]
) -> Plan:
    """The best single degree for this batch."""
    return best_single_degree(Problem.of(lengths, cost, cluster, degrees))


def best_single_degree(problem: Problem) -> Plan:
    """`batch_adaptive` of a problem; always there, whatever the cluster looks like."""
    longest = problem.lengths[0] if len(problem.lengths) else 0
    fitting = [j for j, o in enumerate(problem.options) if o.capacity >= longest]
    return min(
        (one_degree(problem, j, "batch_adaptive") for j in fitting), key=lambda p: p.planned_ms
    )


def one_degree(problem: Problem, option: int, method: str) -> Plan:
    """Best-fit packs of one option, side by side in order of time."""
    bin_of = np.zeros(len(problem.lengths), np.int64)
    bins = kernels.best_fit(problem.lengths, problem.options[option].capacity, bin_of)
    members = np.split(np.argsort(bin_of, kind="stable"), np.cumsum(np.bincount(bin_of))[:-1])
    time = np.bincount(bin_of, problem.time[:, option]) if bins else np.zeros(0)
    packs = [Draft(option, members[b].tolist()) for b in np.argsort(-time, kind="stable")]
    width = groups_at_once(problem.cluster, problem.options[option].degree)
    steps = [packs[i : i + width] for i in range(0, len(packs), width)]
    plan = assemble(problem, steps, cheap_bound(problem), method)
    assert plan is not None  # `width` groups of one degree always have room
    return plan


def groups_at_once(cluster: Cluster, degree: int) -> int:
    """How many groups of one degree a micro-step has room for."""
    if degree > cluster.largest_node:
        return cluster.gpus // degree
    return sum(size // degree for size in cluster.node_sizes)
