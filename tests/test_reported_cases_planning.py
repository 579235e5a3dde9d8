"""Planning failures that people reported in public: each must come out right here."""

from __future__ import annotations

import math

import pytest

from flexray.solver.cluster import Cluster
from flexray.solver.cost import CostModel
from flexray.solver.plan import PlanningError
from flexray.solver.planner import plan_step
from flexray.solver.verify import verify

COST = CostModel(1e-4, 0.1, micro_step_ms=5.0, bandwidth=((2, 10.0),))


def test_openrlhf_1280_one_sequence_over_capacity_is_accepted() -> None:
    cost, cluster = COST.with_capacity(20), Cluster.uniform(1)
    with pytest.raises(PlanningError, match=r"row 1 has length 21 .* holds 20 tokens: use more"):
        plan_step([5, 21], cost, cluster, (1,))
    assert plan_step([20], cost, cluster, (1,)).degrees == [[1]]


def test_megatron_needs_more_ranks_than_there_are_and_fails_late() -> None:
    with pytest.raises(PlanningError, match=r"row 0 has length 100 .* holds 16 tokens"):
        plan_step([100], COST.with_capacity(4), Cluster.uniform(4))


def test_megatron_length_zero_is_a_math_domain_error() -> None:
    cost, cluster = COST.with_capacity(4), Cluster.uniform(4)
    plan = plan_step([0, 4], cost, cluster)
    assert [(d.row, d.why) for d in plan.dropped] == [(0, "zero length")]
    assert [g.rows for m in plan.micro_steps for g in m.groups] == [(1,)]


@pytest.mark.timeout(30)
def test_flexsp_a_sequence_of_the_clusters_capacity_loops_for_ever() -> None:
    plan = plan_step([4 * 20], COST.with_capacity(20), Cluster.uniform(4))
    assert plan.degrees == [[4]]
    plan = plan_step([4 * 20] * 3 + [1], COST.with_capacity(20), Cluster.uniform(4))
    assert sum(len(m.groups) for m in plan.micro_steps) == 4


@pytest.mark.timeout(30)
def test_flexsp_more_micro_batches_than_sequences_gives_empty_ones() -> None:
    # Both fill the cluster: two micro-steps for two sequences, and never a third.
    plan = plan_step([80, 80], COST.with_capacity(20), Cluster.uniform(4))
    assert [[g.rows for g in m.groups] for m in plan.micro_steps] == [[(0,)], [(1,)]]


def test_pulp_649_876_711_a_time_limit_is_reported_as_optimal() -> None:
    """Whatever the solver says: with no time at all there is a verified plan and a finite gap."""
    from flexray.solver.planner import Effort

    lengths, cost, cluster = [70, 33, 21, 9, 8, 7, 5, 5, 3], COST.with_capacity(20), Cluster((4,))
    plan = plan_step(lengths, cost, cluster, effort=Effort(evaluations=1, nodes=50, guard_s=0.0))
    verify(plan, lengths, cost, cluster, (1, 2, 4))
    assert math.isfinite(plan.gap) and plan.gap >= 0


def test_easyr1_11004_micro_step_counts_differ_between_ranks() -> None:
    """Every rank runs every micro-step: a plan has one list of them, idle ranks included."""
    plan = plan_step([900, 900, 100, 100], COST.with_capacity(1000), Cluster.uniform(2), (1,))
    assert plan.degrees == [[1, 1]]
    assert {g.tokens for g in plan.micro_steps[0].groups} == {1000}


def test_flash_attention_1537_zero_length_segments_are_in_no_group() -> None:
    plan = plan_step([0, 5, 0, 7], COST.with_capacity(20), Cluster.uniform(2))
    assert sorted(d.row for d in plan.dropped) == [0, 2]
    assert sorted(r for m in plan.micro_steps for g in m.groups for r in g.rows) == [1, 3]


def test_a_pack_over_2_to_the_31_tokens_is_never_planned() -> None:
    with pytest.raises(PlanningError, match="holds 2147483647 tokens"):
        plan_step([2**31], COST.with_capacity(2**40), Cluster.uniform(2))
    plan = plan_step([2**30, 2**30], COST.with_capacity(2**40), Cluster.uniform(2))
    assert all(g.tokens < 2**31 for m in plan.micro_steps for g in m.groups)
