"""Degrees, clusters, cost models and plans as values."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from flexray.solver.cluster import Cluster
from flexray.solver.cost import MAX_PACK_TOKENS, CostModel
from flexray.solver.degrees import legal_degrees
from flexray.solver.plan import Group, MicroStep, Plan, PlanningError
from flexray.solver.planner import plan_step

COST = CostModel(1e-3, 0.5, bandwidth=((2, 4.0), (8, 2.0)), tokens_per_gpu=10)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "gpus", "degrees"),
    [
        (32, 32, 64, (1, 2, 4, 8, 16, 32)),
        (32, 8, 8, (1, 2, 4, 8)),
        (12, 4, 64, (1, 2, 4, 12)),
        (40, 8, 64, (1, 2, 4, 8, 40)),
        (12, 12, 7, (1, 2, 3, 4, 6)),
        (8, 2, 1, (1,)),
    ],
)
def test_legal_degrees(heads: int, kv_heads: int, gpus: int, degrees: tuple[int, ...]) -> None:
    assert legal_degrees(heads, kv_heads, gpus) == degrees


def test_heads_that_make_no_sense_are_refused() -> None:
    with pytest.raises(PlanningError, match="no multiple"):
        legal_degrees(6, 4, 8)
    with pytest.raises(PlanningError, match="heads must be at least 1"):
        legal_degrees(0, 1, 8)


def test_clusters() -> None:
    assert Cluster.uniform(20).node_sizes == (8, 8, 4)
    assert Cluster((2, 3)).node_of == (0, 0, 1, 1, 1)
    for wrong in (lambda: Cluster.uniform(0), lambda: Cluster((2, 0)), lambda: Cluster(())):
        with pytest.raises(PlanningError, match="at least one GPU"):
            wrong()
    for speed in (0.0, math.nan, math.inf, -1.0):
        with pytest.raises(PlanningError, match="rank 1"):
            Cluster((2,), (1.0, speed))


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("name", ["quadratic", "linear", "micro_step_ms", "mb_per_token"])
def test_an_impossible_coefficient_is_named(name: str, value: float) -> None:
    with pytest.raises(PlanningError, match=name):
        CostModel(**{"quadratic": 1.0, "linear": 1.0, name: value})


def test_an_option_is_the_published_formula() -> None:
    cost = CostModel(
        2e-3, 0.5, per_sequence=3, exchange_mb_per_token=8, exchange_ms=7,
        bandwidth=((2, 4.0), (8, 2.0)), tokens_per_gpu=10,
    )  # fmt: skip
    one, six = cost.options(Cluster((8,)), [6, 1])
    assert (one.quadratic, one.linear, one.fixed, one.capacity) == (2e-3, 0.5, 0, 10)
    # Degree 6 is not listed: it has the bandwidth of the next larger one, 8.
    assert six.linear == pytest.approx((0.5 + 8 / 2.0) / 6)
    assert (six.quadratic, six.per_sequence, six.fixed, six.capacity) == (2e-3 / 6, 3, 7, 60)


def test_memory_counts_states_activations_and_communicators() -> None:
    cost = CostModel(
        0, 1, usable_mb=1000, state_mb=800, mb_per_token=2, communicator_mb=50, communicators=4
    )
    assert cost.capacity(8) == (1000 - 100 - 200) // 2
    with pytest.raises(PlanningError, match="does not fit 1 GPUs"):
        cost.capacity(1)
    # States that two GPUs share take as much of each, however many GPUs there are.
    pairs = replace(cost, shard_size=2)
    assert [pairs.capacity(n) for n in (2, 4, 64)] == [(1000 - 400 - 200) // 2] * 3
    with pytest.raises(PlanningError, match="use a larger shard_size or a smaller model"):
        replace(cost, shard_size=1).capacity(64)
    with pytest.raises(PlanningError, match="memory is not limited"):
        CostModel(0, 1).capacity(1)


def test_a_pack_never_outgrows_32_bit_cu_seqlens() -> None:
    options = COST.with_capacity(2**30).options(Cluster((8,)), [1, 2, 3, 8])
    for option in options:
        assert option.capacity <= MAX_PACK_TOKENS and option.capacity % option.degree == 0


def test_padding_to_a_multiple_of_the_degree_never_overflows_a_rank() -> None:
    # 3 x 7 = 21 tokens: 20 + 1 of padding fit, 21 fit, 22 would put 8 on a rank.
    cost = COST.with_capacity(7)
    assert plan_step([21], cost, Cluster((3,)), [3]).degrees == [[3]]
    with pytest.raises(PlanningError, match="holds 21 tokens"):
        plan_step([22], cost, Cluster((3,)), [3])


def test_a_plan_survives_json_and_reads_well() -> None:
    plan = plan_step([30, 9, 9, 8, 0], COST, Cluster((4,)))
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    assert set(plan.to_dict()) == {
        "planned_ms", "lower_bound_ms", "gap", "solve_s", "method", "dropped", "micro_steps",
    }  # fmt: skip


def test_summary() -> None:
    def step(*degrees: int) -> MicroStep:
        return MicroStep(tuple(Group(d, tuple(range(d)), (0,), (1,), 1.0) for d in degrees), 1.0)

    plan = Plan((step(4), step(1, 2, 1), step(16, *[8] * 6)), 3.0, 2.0, 0.0, "by hand")
    assert plan.summary == "4 | 2 1 1 | 16 8x6"
    assert plan.gap == 0.5
