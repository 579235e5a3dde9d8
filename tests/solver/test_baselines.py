"""Baselines are honest: they pass the verifier and do what their sources say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexray.solver import baselines, flexsp
from flexray.solver.cluster import Cluster
from flexray.solver.cost import CostModel
from flexray.solver.plan import PlanningError
from flexray.solver.verify import verify

# FlexSP's published gpt-7b on 8 x 8 A100-40GB.
GPT_7B = CostModel(
    5.128e-6, 0.1839576, micro_step_ms=629.3563, exchange_mb_per_token=2.0,
    bandwidth=((2, 119.54), (4, 104.07), (8, 96.5), (16, 10.33), (32, 5.94), (64, 4.87)),
    tokens_per_gpu=6449,
)  # fmt: skip
PLAIN = (
    baselines.static,
    baselines.batch_adaptive,
    baselines.megatron_greedy,
    baselines.karmarkar_karp,
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(0, 320), max_size=40),
    nodes=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    capacity=st.integers(320, 640),
)
def test_every_baseline_passes_the_verifier(lengths, nodes, capacity) -> None:
    cluster, cost = Cluster(tuple(nodes)), GPT_7B.with_capacity(capacity)
    for baseline in PLAIN:
        plan = baseline(lengths, cost, cluster, (1, 2, 3, 4))
        verify(plan, lengths, cost, cluster, (1, 2, 3, 4))


def test_long_sequences_at_large_degrees() -> None:
    lengths = [100_000, 30_000, 9_000, *[500] * 60]
    cluster, degrees = Cluster.uniform(64), (1, 2, 4, 8, 16, 32, 64)
    for baseline in (*PLAIN, flexsp.flexsp):
        plan = baseline(lengths, GPT_7B, cluster, degrees)
        verify(plan, lengths, GPT_7B, cluster, degrees)


def test_static_is_one_degree_the_smallest_that_holds_the_longest_of_the_run() -> None:
    cluster = Cluster.uniform(64)
    degrees = (1, 2, 4, 8, 16, 32, 64)
    plan = baselines.static([20_000, 500], GPT_7B, cluster, degrees)
    assert {d for m in plan.degrees for d in m} == {4}
    plan = baselines.static([20_000, 500], GPT_7B, cluster, degrees, longest=191_872)
    assert {d for m in plan.degrees for d in m} == {32}
    with pytest.raises(PlanningError, match="500000"):
        baselines.static([5], GPT_7B, cluster, degrees, longest=500_000)


def test_megatron_degree_is_the_smallest_that_holds_each_sequence() -> None:
    plan = baselines.megatron_greedy(
        [30, 20, 11, 10, 1], GPT_7B.with_capacity(10), Cluster((8,)), (1, 2, 4)
    )
    degree = {row: g.degree for m in plan.micro_steps for g in m.groups for row in g.rows}
    assert degree == {0: 4, 1: 2, 2: 2, 3: 1, 4: 1}


def test_differencing_is_karmarkar_and_karps() -> None:
    values = [8.0, 7.0, 6.0, 5.0, 4.0]
    parts = baselines._differencing(values, 2)
    # Their own example: differencing ends at a difference of 2 (16 and 14).
    assert sorted(sum(values[i] for i in p) for p in parts) == [14, 16]
    parts = baselines._differencing([float(v) for v in range(1, 31)], 5)
    assert sorted(i for p in parts for i in p) == list(range(30))
    sums = [sum(i + 1 for i in p) for p in parts]
    assert max(sums) - min(sums) <= 3


def test_flexsp_cuts_are_consecutive_and_even() -> None:
    lengths = np.sort(np.random.default_rng(0).integers(1, 1000, 50))[::-1]
    ranges = flexsp._cut(lengths, 4)
    assert [a for a, _ in ranges[1:]] == [b for _, b in ranges[:-1]]
    assert ranges[0][0] == 0 and ranges[-1][1] == 50 and len(ranges) <= 4
    assert max(lengths[a:b].sum() for a, b in ranges) <= lengths.sum() / 4 + 1000


def test_flexsp_buckets_round_up_the_fewest_tokens() -> None:
    lengths = np.array([100, 99, 50, 49, 48, 10])
    assert flexsp._buckets(lengths) == [(i, i + 1) for i in range(6)]
    many = np.repeat(np.arange(40, 0, -1), 3)
    ranges = flexsp._buckets(many)
    assert len(ranges) == flexsp.BUCKETS and ranges[-1][1] == len(many)
    rounded = sum((b - a) * many[a] for a, b in ranges) - many.sum()
    # 40 lengths in 16 buckets: at best 8 of three lengths and 8 of two.
    assert rounded == 3 * (8 * (1 + 2) + 8 * 1)


def test_flexsp_ends_where_the_published_code_does_not() -> None:
    cost, cluster = GPT_7B.with_capacity(20), Cluster.uniform(4)
    assert flexsp.flexsp([80], cost, cluster, (1, 2, 4)).degrees == [[4]]
    plan = flexsp.flexsp([80, 80], cost, cluster, (1, 2, 4))
    assert plan.degrees == [[4], [4]]
