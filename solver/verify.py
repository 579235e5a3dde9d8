"""One independent check that every plan passes before anybody uses it.

It shares nothing with the planner but the data types: whatever found a plan (a search, a solver
that calls a time limit "optimal", a baseline), a wrong one stops here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from flexray.solver.cluster import Cluster
from flexray.solver.cost import CostModel, Option
from flexray.solver.plan import Group, Plan, PlanningError

# Sums over a million sequences in another order differ by this much, not more.
RELATIVE = 1e-9


class PlanRejected(PlanningError):
    """A plan that must not be run, and what is wrong with it."""


def verify(
    plan: Plan,
    lengths: Sequence[int],
    cost: CostModel,
    cluster: Cluster,
    degrees: Iterable[int],
) -> None:
    """Checks a plan of the batch `lengths` `(rows,)`.

    Every row of non-zero length is in exactly one group and the zero-length ones in `dropped`;
    ranks of a micro-step are disjoint and exist; degrees are legal and equal the number of ranks;
    a group that fits one node lies in one; memory holds; times are those of the true lengths;
    the bound is not above the plan.

    Raises:
        PlanRejected: with the first thing that is wrong.
    """
    by_degree: dict[int, list[Option]] = {}
    for option in cost.options(cluster, degrees):
        by_degree.setdefault(option.degree, []).append(option)
    _check_coverage(plan, lengths)
    speed, node_of = cluster.speed, cluster.node_of
    for m, step in enumerate(plan.micro_steps):
        if not step.groups:
            raise PlanRejected(f"micro-step {m} has no group")
        _check_ranks(m, step.groups, cluster, node_of)
        slowest = 0.0
        for group in step.groups:
            options = by_degree.get(group.degree)
            if options is None:
                raise PlanRejected(f"micro-step {m}: degree {group.degree} is not legal")
            slowest = max(slowest, _checked_time(m, group, options, speed))
        _check_time(f"micro-step {m}", step.planned_ms, slowest + cost.micro_step_ms)
    _check_time("the step", plan.planned_ms, math.fsum(s.planned_ms for s in plan.micro_steps))
    if not 0 <= plan.lower_bound_ms <= plan.planned_ms * (1 + RELATIVE):
        raise PlanRejected(
            f"lower bound {plan.lower_bound_ms} ms is not within 0 and the plan's "
            f"{plan.planned_ms} ms"
        )


def _check_coverage(plan: Plan, lengths: Sequence[int]) -> None:
    seen: Counter[int] = Counter(d.row for d in plan.dropped)
    for step in plan.micro_steps:
        for group in step.groups:
            if not group.rows:
                raise PlanRejected(f"the group on ranks {group.ranks} has no row")
            if len(group.rows) != len(group.lengths):
                raise PlanRejected(f"the group on ranks {group.ranks}: rows and lengths differ")
            seen.update(group.rows)
            for row, length in zip(group.rows, group.lengths, strict=True):
                if not 0 <= row < len(lengths):
                    raise PlanRejected(f"row {row} is not in the batch of {len(lengths)}")
                if lengths[row] != length or length < 1:
                    raise PlanRejected(f"row {row} has length {lengths[row]}, not {length}")
    for dropped in plan.dropped:
        if not (0 <= dropped.row < len(lengths) and lengths[dropped.row] == dropped.length == 0):
            raise PlanRejected(f"row {dropped.row} is dropped and its length is not 0")
    for row, length in enumerate(lengths):
        if seen[row] != 1:
            raise PlanRejected(f"row {row} of length {length} is {seen[row]} times in the plan")


def _check_ranks(m: int, groups: Sequence[Group], cluster: Cluster, node_of: Sequence[int]) -> None:
    used: set[int] = set()
    for group in groups:
        ranks = group.ranks
        if len(ranks) != group.degree or len(set(ranks)) != group.degree:
            raise PlanRejected(f"micro-step {m}: a group of degree {group.degree} has {ranks}")
        if list(ranks) != sorted(ranks) or ranks[0] < 0 or ranks[-1] >= cluster.gpus:
            raise PlanRejected(f"micro-step {m}: {ranks} are not ascending ranks of {cluster.gpus}")
        if not used.isdisjoint(ranks):
            raise PlanRejected(f"micro-step {m}: {ranks} overlap another group")
        used.update(ranks)
        if group.degree <= cluster.largest_node and len({node_of[r] for r in ranks}) > 1:
            raise PlanRejected(f"micro-step {m}: {ranks} fit in one node and are on several")


def _checked_time(m: int, group: Group, options: Sequence[Option], speed: Sequence[float]) -> float:
    """The group's time, after checking it and its memory against one of its degree's options."""
    tokens = sum(group.lengths)
    fitting = [o for o in options if -(-tokens // o.degree) * o.degree <= o.capacity]
    if not fitting:
        raise PlanRejected(
            f"micro-step {m}: ranks {group.ranks} hold {max(o.capacity for o in options)} tokens "
            f"and get {tokens}"
        )
    squares = math.fsum(float(s) ** 2 for s in group.lengths)
    slowest = min(speed[r] for r in group.ranks)
    times = [
        (o.fixed + o.quadratic * squares + o.linear * tokens + o.per_sequence * len(group.rows))
        / slowest
        for o in fitting
    ]
    best = min(times, key=lambda t: abs(t - group.planned_ms))
    _check_time(f"micro-step {m}, ranks {group.ranks}", group.planned_ms, best)
    return best


def _check_time(what: str, planned: float, true: float) -> None:
    if not math.isclose(planned, true, rel_tol=RELATIVE, abs_tol=1e-9):
        raise PlanRejected(f"{what}: planned {planned} ms and its lengths take {true} ms")
