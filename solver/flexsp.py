"""FlexSP's two stages, as published: cut the batch first, then plan each micro-step alone.

Wang et al., ASPLOS 2025, arXiv 2412.01523, sections 4 and 5. Our own code, for comparison: HiGHS in
place of SCIP, our true lengths in place of ones that are padded to 128.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import pulp

from flexray.solver import milp
from flexray.solver.assemble import Draft, assemble
from flexray.solver.bound import cheap_bound
from flexray.solver.cluster import Cluster
from flexray.solver.cost import CostModel
from flexray.solver.plan import Plan, PlanningError
from flexray.solver.problem import Ints, Problem

BUCKETS = 16


def flexsp(
    lengths: Sequence[int],
    cost: CostModel,
    cluster: Cluster,
    degrees: Iterable[int],
    *,
    limit_s: float = 5.0,
    trials: int = 5,
) -> Plan:
    """Sorted sequences in consecutive micro-steps of like tokens, one MILP for each.

    Args:
        limit_s: CPU time of one MILP. Its plans depend on the machine's speed, as FlexSP's do.
        trials: numbers of micro-steps tried, from the fewest that memory allows.

    Raises:
        PlanningError: no MILP found a plan in its time.
    """
    problem = Problem.of(lengths, cost, cluster, degrees)
    began = time.perf_counter()
    best: Plan | None = None
    fewest = problem.fewest_micro_steps
    for micro_steps in range(fewest, min(fewest + trials, len(problem.lengths) + 1)):
        steps = []
        for first, last in _cut(problem.lengths, micro_steps):
            step = _micro_step(problem, first, last, limit_s)
            if step is None:
                break
            steps.append(step)
        else:
            plan = assemble(problem, steps, cheap_bound(problem), "flexsp")
            if plan and (best is None or plan.planned_ms < best.planned_ms):
                best = plan
    if best is None:
        raise PlanningError(f"FlexSP's MILPs found no plan within {limit_s} s each")
    return replace(best, solve_s=time.perf_counter() - began)


def _cut(lengths: Ints, parts: int) -> list[tuple[int, int]]:
    """Consecutive ranges with the least largest sum of tokens: (first, last + 1) each."""
    total = np.concatenate([[0], np.cumsum(lengths)])
    low, high = int(lengths.max()), int(total[-1])
    while low < high:  # the least limit that `parts` ranges keep
        middle = (low + high) // 2
        low, high = (
            (low, middle) if len(_greedy_cut(total, middle)) <= parts else (middle + 1, high)
        )
    return _greedy_cut(total, low)


def _greedy_cut(total: Ints, limit: int) -> list[tuple[int, int]]:
    ranges, first = [], 0
    while first < len(total) - 1:
        last = int(np.searchsorted(total, total[first] + limit, side="right")) - 1
        ranges.append((first, last))
        first = last
    return ranges


def _buckets(lengths: Ints) -> list[tuple[int, int]]:
    """Up to 16 ranges of descending lengths that round up the fewest tokens, by DP."""
    K = len(lengths)
    total = np.concatenate([[0], np.cumsum(lengths)])
    cost = np.full(K + 1, np.inf)
    cost[0] = 0.0
    came = []
    for _ in range(min(BUCKETS, K)):
        # error[i, k]: cost of the first i, then one bucket i..k at the length of i.
        ends = np.arange(K + 1)
        new, source = np.full(K + 1, np.inf), np.zeros(K + 1, np.int64)
        for i in range(K):
            error = cost[i] + lengths[i] * (ends[i + 1 :] - i) - (total[i + 1 :] - total[i])
            better = error < new[i + 1 :]
            new[i + 1 :][better] = error[better]
            source[i + 1 :][better] = i
        came.append(source)
        cost = new
    ranges, k = [], K
    for source in reversed(came):
        if k == 0:
            break
        ranges.append((int(source[k]), k))
        k = int(source[k])
    return ranges[::-1]


def _micro_step(problem: Problem, first: int, last: int, limit_s: float) -> list[Draft] | None:
    """One MILP: virtual groups of every degree, of which some are used; minimise the slowest."""
    buckets = [(a + first, b + first) for a, b in _buckets(problem.lengths[first:last])]
    N = problem.cluster.gpus
    model = pulp.LpProblem("flexsp", pulp.LpMinimize)
    slowest = pulp.LpVariable("C", 0)
    model += slowest
    groups = [(j, i) for j, d in enumerate(problem.degrees.tolist()) for i in range(N // d)]
    used = {g: pulp.LpVariable(f"m{g[0]}_{g[1]}", cat=pulp.LpBinary) for g in groups}
    share = {
        (b, g): pulp.LpVariable(f"x{b}_{g[0]}_{g[1]}", 0, end - start, pulp.LpInteger)
        for b, (start, end) in enumerate(buckets)
        for g in groups
        if problem.lengths[start] <= problem.options[g[0]].capacity
    }
    model += pulp.lpSum(int(problem.degrees[g[0]]) * used[g] for g in groups) <= N
    for g in groups:
        mine = [(b, x) for (b, h), x in share.items() if h == g]
        option = problem.options[g[0]]
        # A bucket counts at its longest sequence, the first one.
        model += (
            pulp.lpSum(float(problem.time[buckets[b][0], g[0]]) * x for b, x in mine)
            + option.fixed * used[g]
            <= slowest
        )
        model += (
            pulp.lpSum(int(problem.lengths[buckets[b][0]]) * x for b, x in mine)
            <= option.capacity * used[g]
        )
    for b, (start, end) in enumerate(buckets):
        model += pulp.lpSum(x for (c, _), x in share.items() if c == b) == end - start
    if not milp.minimise(model, nodes=10**9, guard_s=100 * limit_s, cpu_s=limit_s).feasible:
        return None
    members: dict[tuple[int, int], list[int]] = {g: [] for g in groups}
    for b, (start, end) in enumerate(buckets):
        rest = iter(range(start, end))
        for (c, g), x in share.items():
            if c == b:
                members[g] += [next(rest) for _ in range(round(x.varValue or 0))]
    return [Draft(g[0], ks) for g, ks in members.items() if ks]
