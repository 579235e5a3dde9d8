"""Plans without FlexRay's planner: what a user would have otherwise, for honest comparison.

Every baseline gives a `Plan` of the same cost model that passes the same verifier.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from flexray.solver import kernels, search
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


def megatron_greedy(
    lengths: Sequence[int], cost: CostModel, cluster: Cluster, degrees: Iterable[int]
) -> Plan:
    """Megatron's dynamic context parallelism: each sequence at the smallest degree that holds it.

    Longest first; a new group while GPUs of the last micro-step are idle, else the group of that
    degree with the least sum(s^2) / degree that has room, else a new micro-step.
    """
    problem = Problem.of(lengths, cost, cluster, degrees)
    steps: list[list[Draft]] = []
    used = np.zeros(len(problem.options), np.int64)
    groups: dict[int, list[Draft]] = {}
    load: dict[int, tuple[int, int]] = {}  # by id of the group's members: s^2, tokens
    for k, length in enumerate(problem.lengths.tolist()):
        j = int(np.flatnonzero(problem.capacity >= length)[0])
        more = used.copy()
        more[j] += 1
        opens = bool(steps) and problem.has_room(more)
        fitting = [
            d
            for d in groups.get(j, [])
            if load[id(d.members)][1] + length <= problem.options[j].capacity
        ]
        if not opens and fitting:
            draft = min(fitting, key=lambda d: load[id(d.members)][0])
        else:
            if not opens:
                steps.append([])
                used[:] = 0
            draft = Draft(j, [])
            steps[-1].append(draft)
            used[j] += 1
            groups.setdefault(j, []).append(draft)
            load[id(draft.members)] = (0, 0)
        squares, tokens = load[id(draft.members)]
        load[id(draft.members)] = (squares + length**2, tokens + length)
        draft.members.append(k)  # type: ignore[union-attr]
    return _assembled(problem, steps, "megatron_greedy")


def karmarkar_karp(
    lengths: Sequence[int], cost: CostModel, cluster: Cluster, degrees: Iterable[int]
) -> Plan:
    """verl's balancing at one degree, the smallest that holds the longest sequence.

    Equal work by Karmarkar and Karp's largest differencing, over as few micro-steps as hold it.
    """
    problem = Problem.of(lengths, cost, cluster, degrees)
    if not len(problem.lengths):
        return _assembled(problem, [], "karmarkar_karp")
    j = int(np.flatnonzero(problem.capacity >= problem.lengths[0])[0])
    time, capacity = problem.time[:, j], problem.options[j].capacity
    width = groups_at_once(cluster, problem.options[j].degree)
    micro_steps = problem.fewest_micro_steps
    while True:
        parts = [p for p in _differencing(time.tolist(), width * micro_steps) if p]
        if all(problem.lengths[p].sum() <= capacity for p in parts):
            break
        micro_steps += 1
    parts.sort(key=lambda p: -float(time[p].sum()))
    drafts = [Draft(j, p) for p in parts]
    steps = [drafts[i : i + width] for i in range(0, len(drafts), width)]
    return _assembled(problem, steps, "karmarkar_karp")


def _differencing(values: list[float], parts: int) -> list[list[int]]:
    """`parts` sets of indices with nearly equal sums.

    Merges the two most uneven partitions, largest part with smallest, until one is left.
    """
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = [
        (-value, i, [(value, [i])]) for i, value in enumerate(values)
    ]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, tie, a = heapq.heappop(heap)
        _, _, b = heapq.heappop(heap)
        # Descending sums; parts that are not listed are empty.
        size = min(parts, len(a) + len(b))
        a += [(0.0, []) for _ in range(size - len(a))]
        b += [(0.0, []) for _ in range(size - len(b))]
        merged = [(x + y, p + q) for (x, p), (y, q) in zip(a, reversed(b[:size]), strict=True)]
        merged.sort(key=lambda part: -part[0])
        smallest = merged[-1][0] if len(merged) == parts else 0.0
        heapq.heappush(heap, (smallest - merged[0][0], tie, merged))
    return [indices for _, indices in heap[0][2]]


def best_single_degree(problem: Problem, cached: Collection[tuple[int, ...]] = ()) -> Plan:
    """`batch_adaptive` of a problem; always there, whatever the cluster looks like."""
    longest = problem.lengths[0] if len(problem.lengths) else 0
    fitting = [j for j, o in enumerate(problem.options) if o.capacity >= longest]
    _, steps = min((packs(problem, j) for j in fitting), key=lambda p: p[0])
    plan = _assembled(problem, steps, "batch_adaptive", cached)
    too_many = len(problem.lengths) * problem.fewest_micro_steps > search.PACK_ONLY
    if not plan.micro_steps or too_many:
        return plan
    even = min((_even(problem, j) for j in fitting), key=lambda found: found.ms)
    if even.ms < plan.planned_ms:
        plan = _assembled(problem, search.drafts(problem, even), "batch_adaptive", cached)
    return plan


def _even(problem: Problem, option: int) -> search.Found:
    """One option everywhere, the sequences spread for equal times; ms is inf if they don't fit."""
    width = groups_at_once(problem.cluster, problem.options[option].degree)
    tokens = width * problem.options[option].capacity
    M = -(-int(problem.lengths.sum()) // tokens)
    counts = np.zeros((M, len(problem.options)), np.int64)
    counts[:, option] = width
    share = problem.time[:, option].sum() / (width * M)
    return search.anneal(problem, search.Configuration(counts, np.full(M, share)), 1)


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


def _assembled(
    problem: Problem,
    steps: list[list[Draft]],
    method: str,
    cached: Collection[tuple[int, ...]] = (),
) -> Plan:
    plan = assemble(problem, steps, cheap_bound(problem), method, cached)
    assert plan is not None  # groups_at_once of one degree always have room
    return plan


def groups_at_once(cluster: Cluster, degree: int) -> int:
    """How many groups of one degree a micro-step has room for."""
    if degree > cluster.largest_node:
        return cluster.gpus // degree
    return sum(size // degree for size in cluster.node_sizes)
