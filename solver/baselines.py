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
            return _assembled(problem, packs(problem, j)[1], "static")
    raise PlanningError(f"no group holds {most} tokens: allow a larger degree")


def batch_adaptive(
    lengths: Sequence[int], cost: CostModel, cluster: Cluster, degrees: Iterable[int]
) -> Plan:
    """The best single degree for this batch."""
    return best_single_degree(Problem.of(lengths, cost, cluster, degrees))


def best_single_degree(problem: Problem) -> Plan:
    """`batch_adaptive` of a problem; always there, whatever the cluster looks like."""
    longest = problem.lengths[0] if len(problem.lengths) else 0
    packed = [packs(problem, j) for j, o in enumerate(problem.options) if o.capacity >= longest]
    _, steps = min(packed, key=lambda p: p[0])
    return _assembled(problem, steps, "batch_adaptive")


def packs(problem: Problem, option: int) -> tuple[float, list[list[Draft]]]:
    """Best-fit packs of one option, side by side in order of time; and ms on ranks of speed 1."""
    bin_of = np.zeros(len(problem.lengths), np.int64)
    bins = kernels.best_fit(problem.lengths, problem.options[option].capacity, bin_of)
    if not bins:
        return 0.0, []
    members = np.split(np.argsort(bin_of, kind="stable"), np.cumsum(np.bincount(bin_of))[:-1])
    time = np.bincount(bin_of, problem.time[:, option]) + problem.fixed[option]
    order = np.argsort(-time, kind="stable")
    width = groups_at_once(problem.cluster, problem.options[option].degree)
    ms = float(time[order][::width].sum()) + -(-bins // width) * problem.micro_step_ms
    return ms, [
        [Draft(option, members[b]) for b in order[i : i + width]] for i in range(0, bins, width)
    ]


def _assembled(problem: Problem, steps: list[list[Draft]], method: str) -> Plan:
    plan = assemble(problem, steps, cheap_bound(problem), method)
    assert plan is not None  # groups_at_once of one degree always have room
    return plan


def groups_at_once(cluster: Cluster, degree: int) -> int:
    """How many groups of one degree a micro-step has room for."""
    if degree > cluster.largest_node:
        return cluster.gpus // degree
    return sum(size // degree for size in cluster.node_sizes)
