"""The fit recovers what made the data, shrugs at outliers, and keeps the prior's shape."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest

from flexray.solver.calibration import Calibrator, Span, StepSpans
from flexray.solver.cost import CostModel

RANKS = 4
TRUE = CostModel(
    quadratic=2e-5,
    linear=0.03,
    per_sequence=1.5,
    micro_step_ms=35.0,
    exchange_mb_per_token=0.02,
    exchange_ms=3.0,
    bandwidth=((2, 0.5), (4, 0.3), (8, 0.2)),
    tokens_per_gpu=10_000,
)
PRIOR = replace(
    TRUE,
    quadratic=1e-6,
    linear=0.1,
    per_sequence=0.0,
    micro_step_ms=0.0,
    exchange_ms=0.0,
    bandwidth=((2, 2.0), (4, 2.0), (8, 2.0)),
)


def span(rng: np.random.Generator, rank: int, degree: int, cost: CostModel = TRUE) -> Span:
    lengths = rng.lognormal(6, 1, rng.integers(1, 12)).astype(int) + 1
    tokens, squares = int(lengths.sum()), float((lengths.astype(float) ** 2).sum())
    compute = (cost.quadratic * squares + cost.linear * tokens) / degree
    compute += cost.per_sequence * len(lengths)
    comm = 0.0
    if degree > 1:
        moved = cost.exchange_mb_per_token * tokens / degree
        comm = moved / cost.bandwidth_at(degree) + cost.exchange_ms
    return Span(rank, 0, degree, tokens, squares, len(lengths), compute, comm)


def steps(
    n: int, degrees: Iterable[int] = (1, 2, 4), cost: CostModel = TRUE, seed: int = 0
) -> list[StepSpans]:
    """Steps of 1 to 3 micro-steps; every rank has a span in each, its group is not modelled."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(n):
        count = int(rng.integers(1, 4))
        spans = [
            replace(span(rng, rank, int(rng.choice(list(degrees))), cost), micro_step=m)
            for m in range(count)
            for rank in range(RANKS)
        ]
        made.append(timed(StepSpans(tuple(spans), 0.0), cost))
    return made


def timed(step: StepSpans, cost: CostModel = TRUE) -> StepSpans:
    """A step that takes what its spans say."""
    slowest: dict[int, float] = {}
    for s in step.spans:
        slowest[s.micro_step] = max(slowest.get(s.micro_step, 0.0), s.compute_ms + s.comm_ms)
    return replace(step, measured_ms=sum(slowest.values()) + cost.micro_step_ms * len(slowest))


def fitted(observed: Iterable[StepSpans], prior: CostModel = PRIOR) -> Calibrator:
    calibrator = Calibrator(prior, range(RANKS))
    for step in observed:
        calibrator.observe(step)
    calibrator.fit()
    return calibrator


def changed(step: StepSpans, change: dict[int, dict[str, float]]) -> StepSpans:
    """`step` with times of some ranks times a factor: {rank: {name: factor}}."""
    return replace(
        step,
        spans=tuple(
            replace(s, **{n: getattr(s, n) * f for n, f in change.get(s.rank, {}).items()})
            for s in step.spans
        ),
    )


def close(a: CostModel, b: CostModel, rel: float) -> None:
    for name in ("quadratic", "linear", "per_sequence", "exchange_ms"):
        assert getattr(a, name) == pytest.approx(getattr(b, name), rel=rel), name
    for degree in (2, 4):
        assert a.bandwidth_at(degree) == pytest.approx(b.bandwidth_at(degree), rel=rel)


def test_noiseless_spans_give_the_coefficients_back() -> None:
    calibrator = fitted(steps(30))
    close(calibrator.cost, TRUE, 1e-3)
    assert calibrator.cost.micro_step_ms == pytest.approx(35.0, rel=1e-3)
    assert calibrator.step_ms == pytest.approx(0.0, abs=0.1)
    assert calibrator.speeds == (1.0,) * RANKS
    assert calibrator.version == 1
    assert max(e for name, e in calibrator.errors.items() if name != "step_ms") < 1e-3


def test_what_a_step_takes_whatever_its_plan_is_told_from_what_a_micro_step_takes() -> None:
    calibrator = fitted(replace(s, measured_ms=s.measured_ms + 120.0) for s in steps(30))
    assert calibrator.cost.micro_step_ms == pytest.approx(35.0, rel=0.01)
    assert calibrator.step_ms == pytest.approx(120.0, rel=0.01)


def test_steps_that_made_communicators_tell_nothing_of_the_fixed_cost() -> None:
    unusual = [replace(s, measured_ms=s.measured_ms + 5000, is_usual=False) for s in steps(30)]
    assert fitted(unusual).cost.micro_step_ms == 0.0
    assert fitted([*unusual[:20], *steps(10)]).cost.micro_step_ms == pytest.approx(35.0, rel=1e-3)


def test_a_fit_of_its_own_prediction_changes_nothing() -> None:
    close(fitted(steps(20), TRUE).cost, TRUE, 1e-6)


def test_stalled_ranks_do_not_count() -> None:
    stall = {"compute_ms": 20.0, "comm_ms": 50.0}
    noisy = [changed(s, {i % RANKS: stall}) if i % 3 == 0 else s for i, s in enumerate(steps(32))]
    calibrator = fitted(noisy)
    close(calibrator.cost, TRUE, 0.02)
    assert calibrator.speeds == (1.0,) * RANKS


def test_one_span_scales_the_prior_and_keeps_its_shape() -> None:
    prior = replace(PRIOR, per_sequence=2.0)
    calibrator = Calibrator(prior, range(RANKS))
    only = Span(0, 0, 1, 1000, 2e5, 5, 3 * (0.2 + 100 + 10), 0.0)
    calibrator.observe(StepSpans((only,), only.compute_ms))
    calibrator.fit()
    for name in ("quadratic", "linear", "per_sequence"):
        assert getattr(calibrator.cost, name) == pytest.approx(3 * getattr(prior, name), rel=1e-6)


def test_a_degree_never_seen_keeps_its_relation_to_those_seen() -> None:
    cost = fitted(steps(30, degrees=(2,))).cost
    assert cost.bandwidth_at(8) == pytest.approx(cost.bandwidth_at(2), rel=1e-6)


def test_nothing_observed_nothing_changed() -> None:
    calibrator = fitted([])
    assert calibrator.cost is PRIOR
    assert calibrator.version == 0


def test_ranks_without_work_are_no_spans() -> None:
    idle = Span(3, 0, 1, 0, 0.0, 0, 900.0, 0.0)
    with_idle = [replace(s, spans=(*s.spans, idle)) for s in steps(30)]
    close(fitted(with_idle).cost, TRUE, 1e-3)


def test_the_fit_follows_a_machine_that_changes() -> None:
    twice = replace(TRUE, quadratic=2 * TRUE.quadratic, linear=2 * TRUE.linear, per_sequence=3.0)
    calibrator = fitted(steps(40))
    for step in steps(20, cost=twice, seed=1):
        calibrator.observe(step)
    calibrator.fit()
    close(calibrator.cost, twice, 0.02)
    for step in steps(20, seed=2):
        calibrator.observe(step)
    calibrator.fit()
    close(calibrator.cost, TRUE, 0.02)


@pytest.mark.parametrize("slow", [{2: 0.5}, {0: 0.25}, {1: 0.7, 3: 0.7}])
def test_slow_ranks_are_found_within_ten_steps_and_do_not_spoil_the_model(
    slow: dict[int, float],
) -> None:
    times = {rank: {"compute_ms": 1 / speed} for rank, speed in slow.items()}
    calibrator = Calibrator(PRIOR, range(RANKS))
    rng = np.random.default_rng(5)
    for step in steps(10):
        noise = {
            rank: {"compute_ms": times.get(rank, {}).get("compute_ms", 1.0) * rng.normal(1, 0.05)}
            for rank in range(RANKS)
        }
        calibrator.observe(changed(step, noise))
        calibrator.fit()
    for rank, speed in enumerate(calibrator.speeds):
        assert speed == pytest.approx(slow.get(rank, 1.0), rel=0.06), rank
    assert calibrator.cost.linear == pytest.approx(TRUE.linear, rel=0.1)
    for step in steps(32, seed=9):  # it recovers
        calibrator.observe(step)
        calibrator.fit()
    assert calibrator.speeds == (1.0,) * RANKS


def test_a_fast_rank_that_waits_for_a_slow_one_in_an_all_to_all_does_not_spoil_the_bandwidth() -> (
    None
):
    def pair(step: StepSpans) -> StepSpans:
        first, second = step.spans[0], replace(step.spans[0], rank=1)
        waits = replace(first, comm_ms=first.comm_ms + first.compute_ms)
        return replace(step, spans=(waits, replace(second, compute_ms=2 * second.compute_ms)))

    calibrator = fitted(map(pair, steps(30, degrees=(2,))))
    assert calibrator.cost.bandwidth_at(2) == pytest.approx(0.5, rel=1e-3)


def test_ranks_that_stay_keep_their_speed_in_another_membership() -> None:
    calibrator = Calibrator(TRUE, ["a", "b", "c", "d"])
    for step in steps(8):
        calibrator.observe(changed(step, {1: {"compute_ms": 2.0}}))
    calibrator.fit()
    other = calibrator.on(calibrator.cost, ["e", "b", "a"])
    assert other.speeds == (1.0, pytest.approx(0.5, rel=1e-3), 1.0)
    assert other.version > calibrator.version


def test_a_rank_that_turns_slow_is_noticed_soon_and_changes_nothing_else() -> None:
    calibrator = fitted(steps(32), TRUE)
    for number, step in enumerate(steps(10, seed=4), 1):
        calibrator.observe(timed(changed(step, {2: {"compute_ms": 2.0}})))
        calibrator.fit()
        if number >= 8:
            assert calibrator.speeds == (1.0, 1.0, pytest.approx(0.5, rel=0.02), 1.0), number
        assert calibrator.cost.linear == pytest.approx(TRUE.linear, rel=0.03), number
        # What whole steps take is told by the speeds that ranks had then.
        assert calibrator.cost.micro_step_ms == pytest.approx(35.0, rel=0.25), number
