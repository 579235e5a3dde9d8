"""The verifier finds each way in which a good plan can be spoilt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from flexray.solver.cluster import Cluster
from flexray.solver.cost import CostModel
from flexray.solver.plan import Dropped, Group, MicroStep, Plan
from flexray.solver.planner import Effort, plan_step
from flexray.solver.verify import PlanRejected, verify

COST = CostModel(1e-4, 0.1, micro_step_ms=10, bandwidth=((2, 5.0),), tokens_per_gpu=1000)
CLUSTER = Cluster((4, 4))
LENGTHS = [3500, 900, 800, 0, 700, 600, 500, 400, 300, 200, 100]
DEGREES = (1, 2, 4)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_step(LENGTHS, COST, CLUSTER, DEGREES, effort=Effort(evaluations=100_000))


def with_group(plan: Plan, m: int, g: int, **changes: object) -> Plan:
    step = plan.micro_steps[m]
    groups = list(step.groups)
    groups[g] = replace(groups[g], **changes)  # type: ignore[arg-type]
    return with_step(plan, m, replace(step, groups=tuple(groups)))


def with_step(plan: Plan, m: int, step: MicroStep) -> Plan:
    steps = list(plan.micro_steps)
    steps[m] = step
    return replace(plan, micro_steps=tuple(steps))


def first(plan: Plan) -> Group:
    return plan.micro_steps[0].groups[0]


def row_twice(p: Plan) -> Plan:
    g, h = p.micro_steps[0].groups[:2]
    return with_group(p, 0, 1, rows=(*h.rows, g.rows[0]), lengths=(*h.lengths, g.lengths[0]))


def row_lost(p: Plan) -> Plan:
    g = max(p.micro_steps[0].groups, key=lambda g: len(g.rows))
    return with_group(
        p, 0, p.micro_steps[0].groups.index(g), rows=g.rows[1:], lengths=g.lengths[1:]
    )


def ranks_overlap(p: Plan) -> Plan:
    g, h = p.micro_steps[0].groups[:2]
    return with_group(p, 0, 1, ranks=g.ranks[: h.degree])


def two_nodes(p: Plan) -> Plan:
    """Every rank two further: groups of four no longer lie inside a node."""
    steps = [
        replace(m, groups=tuple(replace(g, ranks=shifted(g.ranks)) for g in m.groups))
        for m in p.micro_steps
    ]
    return replace(p, micro_steps=tuple(steps))


def shifted(ranks: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted((r + 2) % 8 for r in ranks))


def overfull(p: Plan) -> Plan:
    everything = [r for r in range(len(LENGTHS)) if LENGTHS[r]]
    group = Group(4, (0, 1, 2, 3), tuple(everything), tuple(LENGTHS[r] for r in everything), 0.0)
    return replace(p, micro_steps=(MicroStep((group,), 0.0),))


SPOILT: dict[str, tuple[Callable[[Plan], Plan], str]] = {
    "row twice": (row_twice, "2 times"),
    "row lost": (row_lost, "0 times"),
    "length rounded": (
        lambda p: with_group(p, 0, 0, lengths=tuple(s + 1 for s in first(p).lengths)),
        "has length",
    ),
    "row that is not there": (lambda p: with_group(p, 0, 0, rows=(99,), lengths=(5,)), "not in"),
    "ranks overlap": (ranks_overlap, "overlap"),
    "rank that is not there": (
        lambda p: with_group(p, 0, 0, ranks=tuple(range(5, 5 + first(p).degree))),
        "not ascending ranks of 8",
    ),
    "rank twice": (lambda p: with_group(p, 0, 0, ranks=(0,) * first(p).degree), "degree 4 has"),
    "one rank too few": (
        lambda p: with_group(p, 0, 0, ranks=first(p).ranks[:-1]),
        "degree 4 has",
    ),
    "ranks in disorder": (
        lambda p: with_group(p, 0, 0, ranks=first(p).ranks[::-1]),
        "not ascending",
    ),
    "group across nodes": (two_nodes, "on several"),
    "illegal degree": (
        lambda p: with_group(p, 0, 0, degree=3, ranks=first(p).ranks[:3]),
        "degree 3 is not legal",
    ),
    "memory": (overfull, "hold 4000 tokens and get 8000"),
    "group time": (lambda p: with_group(p, 0, 0, planned_ms=first(p).planned_ms * 0.99), "planned"),
    "micro-step time": (
        lambda p: with_step(p, 0, replace(p.micro_steps[0], planned_ms=1.0)),
        "micro-step 0: planned",
    ),
    "step time": (lambda p: replace(p, planned_ms=p.planned_ms * 0.99), "the step: planned"),
    "bound above the plan": (
        lambda p: replace(p, lower_bound_ms=p.planned_ms * 1.01),
        "lower bound",
    ),
    "bound that is no number": (lambda p: replace(p, lower_bound_ms=float("nan")), "lower bound"),
    "empty micro-step": (
        lambda p: replace(p, micro_steps=(*p.micro_steps, MicroStep((), 10.0))),
        "no group",
    ),
    "empty group": (
        lambda p: with_step(
            p,
            0,
            replace(
                p.micro_steps[0], groups=(*p.micro_steps[0].groups, Group(1, (7,), (), (), 0.0))
            ),
        ),
        "no row",
    ),
    "zero-length row forgotten": (lambda p: replace(p, dropped=()), "row 3 of length 0 is 0"),
    "row dropped": (
        lambda p: replace(p, dropped=(*p.dropped, Dropped(0, 3500, "too long"))),
        "row 0 is dropped",
    ),
}


def test_a_good_plan_passes(plan: Plan) -> None:
    verify(plan, LENGTHS, COST, CLUSTER, DEGREES)
    assert first(plan).degree == 4


@pytest.mark.parametrize("how", SPOILT)
def test_a_spoilt_plan_is_rejected(plan: Plan, how: str) -> None:
    spoil, says = SPOILT[how]
    with pytest.raises(PlanRejected, match=says):
        verify(spoil(plan), LENGTHS, COST, CLUSTER, DEGREES)


def test_a_slow_rank_makes_its_group_slow(plan: Plan) -> None:
    slow = Cluster((4, 4), (0.5,) * 8)
    with pytest.raises(PlanRejected, match="planned"):
        verify(plan, LENGTHS, COST, slow, DEGREES)
