"""What `flexray profile` runs tells every coefficient, and a bad fit is refused."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from flexray.datasets.random_rows import RandomRows
from flexray.measurement.design import Case, Pack, across, across_round, inside, one_round, ramp
from flexray.measurement.fit import BadFit, Fit, Observed, fit
from flexray.measurement.memory import fit_memory
from flexray.measurement.preset import MemoryTerms
from flexray.solver.calibration import Span, StepSpans
from flexray.solver.cluster import Cluster
from flexray.solver.cost import CostModel
from flexray.solver.memory import Peak

CPU = CostModel(
    quadratic=2e-5,
    linear=0.05,
    per_sequence=1.5,
    micro_step_ms=35.0,
    exchange_mb_per_token=0.02,
    exchange_ms=3.0,
    bandwidth=((2, 0.5), (4, 0.3), (8, 0.1)),
    tokens_per_gpu=10_000,
)
GPU = CostModel(
    quadratic=9e-6,
    linear=0.3,
    micro_step_ms=300.0,
    exchange_mb_per_token=3.0,
    exchange_ms=4.0,
    bandwidth=((2, 120.0), (4, 100.0), (8, 90.0), (16, 10.0)),
    tokens_per_gpu=100_000,
)
STEP_MS = 120.0


def wrong(cost: CostModel) -> CostModel:
    """Coefficients off by 3 and more, and no idea of bandwidths."""
    return replace(
        cost,
        quadratic=cost.quadratic / 3,
        linear=cost.linear * 3,
        per_sequence=0.1,
        micro_step_ms=cost.micro_step_ms * 3,
        exchange_ms=0.1,
        bandwidth=((1, 1.0),),
    )


def ran(
    case: Case, cost: CostModel, rng: np.random.Generator, noise: float, slow: int | None = None
) -> StepSpans:
    """A step as the ranks would report it; rank `slow` computes at half the speed."""
    spans, whole = [], STEP_MS
    for number, micro_step in enumerate(case.plan.micro_steps):
        slowest = 0.0
        for group in micro_step.groups:
            d, tokens, squares = group.degree, group.tokens, sum(n * n for n in group.lengths)
            compute = (cost.quadratic * squares + cost.linear * tokens) / d
            compute += cost.per_sequence * len(group.rows)
            comm = 0.0
            if d > 1:
                comm = cost.exchange_mb_per_token * tokens / d / cost.bandwidth_at(d)
                comm += cost.exchange_ms
            own = {r: compute * rng.normal(1, noise) * (1 + (r == slow)) for r in group.ranks}
            last = max(own.values())
            for rank in group.ranks:
                waits = last - own[rank] if d > 1 else 0.0  # in the all-to-alls
                exchange = comm * rng.normal(1, noise) + waits
                pack = (d, tokens, squares, len(group.rows))
                spans.append(Span(rank, number, *pack, own[rank], exchange))
                slowest = max(slowest, own[rank] + exchange)
        whole += slowest + cost.micro_step_ms * rng.normal(1, noise)
    return StepSpans(tuple(spans), whole)


def observed(
    cases: list[Case], cost: CostModel, noise: float = 0.05, slow: int | None = None
) -> list[Observed]:
    rng = np.random.default_rng(0)
    return [Observed.of(c.plan, [ran(c, cost, rng, noise, slow) for _ in range(5)]) for c in cases]


@pytest.mark.parametrize(
    ("cost", "nodes", "degrees", "tokens", "longest"),
    [
        (CPU, (4,), (1, 2, 4), 4096, 3072),
        (CPU, (2, 2), (1, 2, 4), 1024, 256),
        (CPU, (3, 2), (1, 2, 4), 2048, 4096),
        (GPU, (8, 8), (1, 2, 4, 8, 16), 16384, 131072),
    ],
)
def test_coefficients_come_back_through_five_percent_of_noise(
    cost, nodes, degrees, tokens, longest
):
    cluster = Cluster(nodes)
    cases = one_round(cluster, degrees, tokens, longest)
    found = fit(wrong(cost), cluster, observed(cases, cost))
    found.check()
    # How much of a span each term is decides how well it can be known.
    assert found.cost.linear == pytest.approx(cost.linear, rel=0.08)
    assert found.cost.quadratic * longest == pytest.approx(
        cost.quadratic * longest, abs=0.05 * (cost.linear + cost.quadratic * longest)
    )
    assert found.cost.per_sequence == pytest.approx(cost.per_sequence, rel=0.15, abs=0.3)
    quarter_ms = cost.exchange_mb_per_token * tokens / 4 / cost.bandwidth_at(2)
    assert found.cost.exchange_ms == pytest.approx(cost.exchange_ms, abs=0.05 * quarter_ms + 0.5)
    for degree in degrees[1:]:
        assert found.cost.bandwidth_at(degree) == pytest.approx(cost.bandwidth_at(degree), rel=0.1)
    # What stragglers cost is in the fixed costs: of those only the noiseless test can tell more.
    assert max(p.error for p in found.points if p.kind == "step") < 0.1
    assert set(found.by_kind()) == {
        "compute",
        "step",
        *(f"all-to-all, degree {d}" for d in degrees[1:]),
    }


def test_without_noise_they_come_back_exactly():
    cluster = Cluster((2, 2))
    found = fit(
        wrong(CPU), cluster, observed(one_round(cluster, (1, 2, 4), 4096, 3072), CPU, noise=0.0)
    )
    for name in ("quadratic", "linear", "per_sequence", "exchange_ms", "micro_step_ms"):
        assert getattr(found.cost, name) == pytest.approx(getattr(CPU, name), rel=1e-3), name
    assert found.step_ms == pytest.approx(STEP_MS, rel=1e-3)
    assert max(point.error for point in found.points) < 1e-3


def test_one_rank_needs_no_all_to_all():
    cluster = Cluster((1,))
    found = fit(wrong(CPU), cluster, observed(one_round(cluster, (1,), 4096, 3072), CPU))
    found.check()
    assert found.cost.linear == pytest.approx(CPU.linear, rel=0.08)
    assert set(found.by_kind()) == {"compute", "step"}


def test_a_slow_rank_is_a_speed_and_no_cost():
    cluster = Cluster((4,))
    cases = one_round(cluster, (1, 2, 4), 4096, 3072)
    found = fit(wrong(CPU), cluster, observed(cases, CPU, slow=2))
    found.check()
    assert found.speeds == pytest.approx((1, 1, 0.5, 1), rel=0.1)
    assert max(point.error for point in found.points) < 0.2
    assert found.cost.linear == pytest.approx(CPU.linear, rel=0.08)


def test_noise_as_large_as_the_times_is_refused():
    cluster = Cluster((4,))
    steps = observed(one_round(cluster, (1, 2, 4), 4096, 3072), CPU, noise=0.02)
    rng = np.random.default_rng(1)
    wild = [
        replace(
            step,
            spans=replace(
                step.spans,
                spans=tuple(
                    replace(s, compute_ms=s.compute_ms * rng.lognormal(0, 1.5))
                    for s in step.spans.spans
                ),
            ),
        )
        for step in steps
    ]
    with pytest.raises(BadFit, match=r"^compute: half of 68 predictions are off by \d+% or more"):
        fit(wrong(CPU), cluster, wild).check()


def test_a_term_that_the_steps_do_not_tell_is_refused():
    cluster = Cluster((4,))
    packs = [Pack(1024, 1024)]  # one kind only: a token, its square and a row are one
    cases = [Case.of(packs * m, inside(cluster, 1)) for m in (1, 2, 3, 4)]
    with pytest.raises(BadFit, match=r"^\w+: the measured steps do not tell it") as refused:
        fit(wrong(CPU), cluster, observed(cases, CPU)).check()
    assert refused.match("^(quadratic|linear|per_sequence):")


def test_all_to_alls_that_take_no_longer_with_more_tokens_are_refused():
    cluster = Cluster((4,))
    steps = observed(one_round(cluster, (1, 4), 4096, 3072), CPU, noise=0.0)
    flat = [
        replace(
            step,
            spans=replace(
                step.spans,
                spans=tuple(
                    replace(s, comm_ms=10 - 1e-4 * s.tokens if s.degree > 1 else 0.0)
                    for s in step.spans.spans
                ),
            ),
        )
        for step in steps
    ]
    with pytest.raises(BadFit, match=r"^bandwidth 4: its all-to-alls took no longer"):
        fit(wrong(CPU), cluster, flat).check()


@pytest.mark.parametrize("nodes", [(4,), (2, 2), (3, 2), (8, 8, 4)])
@pytest.mark.parametrize("degree", [1, 2, 4, 8])
def test_every_rank_works_in_every_micro_step(nodes, degree):
    cluster = Cluster(nodes)
    for groups in (inside(cluster, degree), across(cluster, degree)):
        if groups:
            ranks = [rank for group in groups for rank in group]
            assert sorted(ranks) == list(range(cluster.gpus))
            assert all(list(group) == sorted(group) for group in groups)
            assert {len(group) for group in groups} <= {1, degree}
    node_of = cluster.node_of
    if degree <= cluster.largest_node:
        assert all(len({node_of[r] for r in g}) == 1 for g in inside(cluster, degree))
    for group in across(cluster, degree):
        assert len(group) == 1 or len({node_of[r] for r in group}) > 1
    can_span = 1 < degree <= cluster.largest_node and len(nodes) > 1
    assert Counter(len(g) for g in across(cluster, degree))[degree] > 0 or not can_span


def test_the_all_to_all_across_nodes_is_told_from_the_one_inside():
    cluster = Cluster((2, 2))
    slow = replace(CPU, bandwidth=((2, 0.05), (4, 0.05)))
    cases = across_round(cluster, (1, 2, 4), 4096, 3072)
    found = fit(CPU, cluster, observed(cases, slow))
    assert found.cost.bandwidth_at(2) == pytest.approx(0.05, rel=0.1)


def test_lengths_of_a_pack_are_what_every_rank_is_to_hold():
    assert Pack(100, 40).lengths(1) == (34, 33, 33)
    assert Pack(100, 1000).lengths(4) == (400,)
    assert sum(Pack(1023, 32).lengths(3)) == 3069


def test_a_row_is_as_long_as_its_number_and_the_same_everywhere():
    tokens, labels = RandomRows(256).open().read(37)
    assert tokens.shape == (37,) and labels is None
    assert tokens.min() >= 0 and tokens.max() < 256
    assert (RandomRows(256).read(37)[0] == tokens).all()


def test_memory_of_a_token_and_of_the_logits():
    def mb(tokens: int) -> float:
        return 900.0 + 0.25 * tokens + 0.5 * min(tokens, 1024)

    tokens = [n for n, _ in ramp(Cluster((2,)), 20_000, 4096)]
    assert tokens[:3] == [32, 64, 128] and tokens[-1] == 16384
    memory = fit_memory([Peak(n, mb(n)) for n in tokens], 1024)
    assert memory is not None
    assert memory.mb_per_token == pytest.approx(0.25, rel=1e-6)
    assert memory.logits_mb == pytest.approx(512.0, rel=1e-6)
    assert memory.fixed_mb == pytest.approx(900.0, rel=1e-6)
    terms = MemoryTerms.of(replace(CPU, usable_mb=4000.0, state_mb=1000.0), memory, "cuda", 2)
    assert terms.usable_mb == 4000
    assert terms.buffers_mb == pytest.approx(512 + (900 - 1000 / 2))


def test_peaks_of_a_process_that_its_start_hides_tell_nothing():
    peaks = [Peak(2**i, max(500.0, 480 + 0.05 * 2**i)) for i in range(5, 11)]
    assert fit_memory(peaks, 1024) is None  # only the last three are over that of the start
    more = [*peaks, *(Peak(2**i, 480 + 0.05 * 2**i) for i in range(11, 14))]
    memory = fit_memory(more, 256)
    assert memory is not None and memory.mb_per_token == pytest.approx(0.05, rel=1e-6)


def test_a_fit_shows_what_it_was_held_against():
    cluster = Cluster((2,))
    cases = one_round(cluster, (1, 2), 1024, 1024)
    found: Fit = fit(wrong(CPU), cluster, observed(cases, CPU, noise=0.0))
    spans = sum(2 * len(case.plan.micro_steps) for case in cases)
    kinds = {kind: len(points) for kind, points in found.by_kind().items()}
    assert kinds == {"compute": spans, "all-to-all, degree 2": 4, "step": len(cases)}
