"""The fit recovers what made the data, shrugs at outliers, and keeps the prior's shape."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flexray.solver.calibration import Calibrator, Span, StepSpan
from flexray.solver.cost import CostModel

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


def span(rng: np.random.Generator, degree: int) -> Span:
    lengths = rng.lognormal(6, 1, rng.integers(1, 12)).astype(int) + 1
    tokens, squares = int(lengths.sum()), float((lengths.astype(float) ** 2).sum())
    compute = (TRUE.quadratic * squares + TRUE.linear * tokens) / degree + TRUE.per_sequence * len(
        lengths
    )
    comm = 0.0
    if degree > 1:
        moved = TRUE.exchange_mb_per_token * tokens / degree
        comm = moved / TRUE.bandwidth_at(degree) + TRUE.exchange_ms
    return Span(degree, tokens, squares, len(lengths), compute, comm)


def spans(n: int) -> list[Span]:
    rng = np.random.default_rng(0)
    return [span(rng, int(rng.choice([1, 2, 4]))) for _ in range(n)]


def close(a: CostModel, b: CostModel, rel: float) -> None:
    for name in ("quadratic", "linear", "per_sequence", "exchange_ms"):
        assert getattr(a, name) == pytest.approx(getattr(b, name), rel=rel), name
    for degree in (2, 4):
        assert a.bandwidth_at(degree) == pytest.approx(b.bandwidth_at(degree), rel=rel)


def test_noiseless_spans_give_the_coefficients_back() -> None:
    calibrator = Calibrator(PRIOR)
    calibrator.observe(*spans(200), StepSpan(500.0, 2, 570.0), StepSpan(900.0, 3, 1005.0))
    close(calibrator.fit(), TRUE, 1e-3)
    assert calibrator.cost.micro_step_ms == pytest.approx(35.0)
    assert calibrator.version == 1


def test_a_fit_of_its_own_prediction_changes_nothing() -> None:
    calibrator = Calibrator(TRUE)
    calibrator.observe(*spans(100))
    close(calibrator.fit(), TRUE, 1e-6)


def test_stalled_ranks_do_not_count() -> None:
    noisy = spans(300)
    for i in range(0, 300, 12):
        noisy[i] = replace(noisy[i], compute_ms=noisy[i].compute_ms * 20, comm_ms=2000.0)
    calibrator = Calibrator(PRIOR)
    calibrator.observe(*noisy)
    close(calibrator.fit(), TRUE, 0.02)


def test_one_span_scales_the_prior_and_keeps_its_shape() -> None:
    prior = replace(PRIOR, per_sequence=2.0)
    calibrator = Calibrator(prior)
    calibrator.observe(Span(1, 1000, 2e5, 5, 3 * (0.2 + 100 + 10), 0.0))
    fitted = calibrator.fit()
    for name in ("quadratic", "linear", "per_sequence"):
        assert getattr(fitted, name) == pytest.approx(3 * getattr(prior, name), rel=1e-6)


def test_a_degree_never_seen_keeps_its_relation_to_those_seen() -> None:
    calibrator = Calibrator(PRIOR)
    calibrator.observe(*(s for s in spans(200) if s.degree == 2))
    fitted = calibrator.fit()
    assert fitted.bandwidth_at(8) == pytest.approx(fitted.bandwidth_at(2), rel=1e-6)


def test_nothing_observed_nothing_changed() -> None:
    calibrator = Calibrator(PRIOR)
    assert calibrator.fit() is PRIOR
    assert calibrator.version == 0


def test_old_spans_leave_the_window() -> None:
    calibrator = Calibrator(PRIOR, window=100)
    calibrator.observe(*(replace(s, compute_ms=s.compute_ms * 5) for s in spans(100)))
    calibrator.observe(*spans(100))
    close(calibrator.fit(), TRUE, 1e-3)
