"""Every plan of every input passes the verifier, or the input is refused in one clear line."""

from __future__ import annotations

import os
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexray.solver.baselines import batch_adaptive, static
from flexray.solver.cluster import Cluster
from flexray.solver.cost import CostModel
from flexray.solver.plan import PlanningError
from flexray.solver.planner import Effort, plan_step, warm
from flexray.solver.verify import verify

COST = CostModel(
    5.128e-6, 0.18, micro_step_ms=600, exchange_mb_per_token=2,
    bandwidth=((2, 120.0), (4, 104.0), (8, 96.0), (16, 10.3), (32, 5.9), (64, 4.9)),
    tokens_per_gpu=6449,
)  # fmt: skip
SMALL = Effort(evaluations=20_000, nodes=5)
# `make fuzz` asks for many more, new ones each time.
FUZZ = int(os.environ.get("FLEXRAY_FUZZ", "0"))


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    warm()


def wiki_like(n: int, seed: int = 0) -> list[int]:
    rng = np.random.default_rng(seed)
    return np.clip(rng.lognormal(6, 1.6, n), 1, 150_000).astype(int).tolist()


@st.composite
def instances(draw: st.DrawFn):
    nodes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    gpus = sum(nodes)
    speeds = draw(
        st.just(()) | st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=gpus, max_size=gpus)
    )
    cluster = Cluster(tuple(nodes), tuple(speeds))
    degrees = draw(st.sets(st.integers(1, 12), min_size=1, max_size=5))
    if min(degrees) > gpus:
        degrees.add(gpus)
    capacity = draw(st.integers(1, 200))
    largest = max(d for d in degrees if d <= gpus)
    lengths = draw(st.lists(st.integers(0, capacity * largest), max_size=40))
    number = st.sampled_from([0.0, 1e-3, 0.1, 10.0])
    cost = CostModel(
        quadratic=draw(number), linear=draw(number), per_sequence=draw(number),
        micro_step_ms=draw(number), exchange_mb_per_token=draw(number), exchange_ms=draw(number),
        bandwidth=((2, 5.0), (4, 4.0), (8, 1.0)), tokens_per_gpu=capacity,
    )  # fmt: skip
    return lengths, cost, cluster, degrees


@settings(max_examples=FUZZ or 300, deadline=None, derandomize=not FUZZ)
@given(instances())
def test_any_instance_gets_a_verified_plan(instance) -> None:
    lengths, cost, cluster, degrees = instance
    plan = plan_step(lengths, cost, cluster, degrees, effort=SMALL)
    assert plan.solve_s < SMALL.guard_s + 0.5
    verify(plan, lengths, cost, cluster, degrees)
    best = batch_adaptive(lengths, cost, cluster, degrees)
    verify(best, lengths, cost, cluster, degrees)
    assert plan.planned_ms <= best.planned_ms * (1 + 1e-9)


def test_the_same_input_gives_the_same_plan() -> None:
    lengths = wiki_like(200)
    plans = [plan_step(lengths, COST, Cluster.uniform(32)) for _ in range(2)]
    assert plans[0] == plans[1]


def test_more_effort_is_never_worse() -> None:
    lengths = wiki_like(300, seed=5)
    times = [
        plan_step(lengths, COST, Cluster.uniform(64), effort=Effort(evaluations=e)).planned_ms
        for e in (1, 100_000, 5_000_000)
    ]
    assert times[0] >= times[1] >= times[2]
    assert times[0] > times[2]


def test_the_joint_milp_improves_or_ties_and_says_nothing(
    capfd: pytest.CaptureFixture[str],
) -> None:
    cluster, methods = Cluster.uniform(16, 4), set()
    for seed in range(12):
        lengths = wiki_like(60, seed)
        without, with_milp = (
            plan_step(lengths, COST, cluster, effort=Effort(evaluations=2000, nodes=nodes))
            for nodes in (0, 5)
        )
        assert with_milp.planned_ms <= without.planned_ms
        methods.add(with_milp.method)
    assert "joint MILP" in methods
    assert capfd.readouterr() == ("", "")


def test_a_plan_beats_every_single_degree_on_mixed_lengths() -> None:
    lengths = wiki_like(500, seed=1)
    cluster, degrees = Cluster.uniform(64), (1, 2, 4, 8, 16, 32, 64)
    plan = plan_step(lengths, COST, cluster, degrees)
    one = batch_adaptive(lengths, COST, cluster, degrees).planned_ms
    assert one > 1.2 * plan.planned_ms
    assert static(lengths, COST, cluster, degrees).planned_ms >= one
    assert plan.gap < 0.2


def test_slow_ranks_get_less() -> None:
    cluster = Cluster((4,), (1.0, 1.0, 1.0, 0.25))
    cost = CostModel(0, 1, tokens_per_gpu=10_000)
    plan = plan_step([100] * 26, cost, cluster, (1,))
    tokens = {g.ranks[0]: g.tokens for g in plan.micro_steps[0].groups}
    assert tokens == {0: 800, 1: 800, 2: 800, 3: 200}


def test_cached_communicators_are_preferred_between_equal_plans() -> None:
    lengths = [4000, 100, 100, 100]
    cluster, cost = Cluster.uniform(4), COST.with_capacity(2200)
    plain = plan_step(lengths, cost, cluster, (1, 2))
    assert (1, 3) not in [g.ranks for g in plain.micro_steps[0].groups]
    cached = plan_step(lengths, cost, cluster, (1, 2), cached=((1, 3),))
    assert (1, 3) in [g.ranks for g in cached.micro_steps[0].groups]
    assert cached.planned_ms == plain.planned_ms


def test_powers_of_two_meet_at_most_log2_n_communicators_a_rank() -> None:
    cluster, seen = Cluster.uniform(64), set()
    for seed in range(30):
        plan = plan_step(wiki_like(200, seed), COST, cluster, effort=SMALL)
        seen |= {g.ranks for m in plan.micro_steps for g in m.groups if g.degree > 1}
    assert max(Counter(rank for ranks in seen for rank in ranks).values()) <= 6


def test_five_pairs_do_not_fit_two_nodes_of_five() -> None:
    # Ten GPUs hold five pairs by number, but a pair lies inside a node: four at once.
    cost = CostModel(0, 1, micro_step_ms=1, tokens_per_gpu=10)
    plan = plan_step([20] * 5, cost, Cluster((5, 5)), (2,))
    assert sorted(map(len, plan.degrees)) == [1, 4]


def test_a_group_larger_than_a_node_spans_nodes() -> None:
    cost = CostModel(0, 1, micro_step_ms=1, tokens_per_gpu=10)
    plan = plan_step([60, 20, 20], cost, Cluster((4, 4, 2)), (2, 6))
    assert plan.degrees == [[6, 2, 2]]


def test_equal_lengths_are_spread_evenly() -> None:
    plan = plan_step(
        [100] * 64, CostModel(0, 1, micro_step_ms=5, tokens_per_gpu=800), Cluster((8,))
    )
    assert plan.degrees == [[1] * 8]
    assert {g.tokens for g in plan.micro_steps[0].groups} == {800}


def test_one_sequence() -> None:
    plan = plan_step([6000], COST, Cluster.uniform(8), (1, 2, 4, 8))
    assert plan.degrees == [[8]]
    assert plan.gap < 1e-9


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_nothing_to_plan_is_an_empty_plan(lengths: list[int]) -> None:
    plan = plan_step(lengths, COST, Cluster.uniform(8))
    assert plan.micro_steps == () and plan.planned_ms == 0 and plan.gap == 0
    assert [d.row for d in plan.dropped] == list(range(len(lengths)))


@pytest.mark.parametrize(
    ("lengths", "degrees", "says"),
    [
        ([5, -1], (1,), "row 1 has length -1"),
        ([5, 6450], (1,), "row 1 has length 6450 .* holds 6449 tokens"),
        ([2**40], None, "row 0 has length 1099511627776"),
        ([5.5], (1,), "whole numbers"),
        ([5], (), "no legal degree"),
        ([5], (16,), "no legal degree for 8 GPUs"),
        ([5], (0, 1), "degree 0"),
    ],
)
def test_what_cannot_be_planned_says_why(lengths, degrees, says: str) -> None:
    with pytest.raises(PlanningError, match=says) as caught:
        plan_step(lengths, COST, Cluster.uniform(8), degrees)
    assert "\n" not in str(caught.value)


def test_a_length_of_2_to_the_40_with_room_for_it() -> None:
    # A pack never has more than 2^31 - 1 tokens, however much memory there is.
    with pytest.raises(PlanningError, match="holds 2147483647 tokens"):
        plan_step([2**40], COST.with_capacity(2**40), Cluster.uniform(8))


def test_a_million_sequences_are_planned() -> None:
    lengths = np.random.default_rng(0).integers(1, 2000, 1_000_000).tolist()
    began = time.process_time()
    plan = plan_step(lengths, COST, Cluster.uniform(64))
    assert time.process_time() - began < 60
    assert plan.gap < 0.5
