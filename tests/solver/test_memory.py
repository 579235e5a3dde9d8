"""Peaks of memory become the model's memory terms, and the longest sequence stays possible."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from flexray.solver.calibration import Calibrator, Span, StepSpans
from flexray.solver.cost import CostModel
from flexray.solver.memory import Peak, with_peaks

GPUS = 4
COST = CostModel(
    quadratic=1e-5,
    linear=1e-2,
    usable_mb=10_000,
    state_mb=4_000,
    mb_per_token=1.0,
    communicator_mb=100,
    communicators=5,
)
TOKENS = (900, 1300, 1700, 2500, 4000)


def peaks(mb: Callable[[int], float], tokens: Iterable[int] = TOKENS) -> list[Peak]:
    return [Peak(n, mb(n)) for n in tokens]


def test_peaks_on_a_line_tell_what_a_token_takes_and_what_there_is_beside_the_states() -> None:
    cost = with_peaks(COST, peaks(lambda n: 1000 + 700 + 0.5 * n), GPUS, 1)
    assert cost.mb_per_token == pytest.approx(0.5)
    assert cost.buffers_mb == pytest.approx(700)
    # NCCL's buffers are no part of the allocator's peaks: they stay as they were counted.
    assert cost.capacity(GPUS) == pytest.approx((10_000 - 1000 - 700 - 500) / 0.5, abs=1)


def test_shares_that_are_alike_have_all_beside_the_states_put_down_to_tokens() -> None:
    alike = peaks(lambda n: 1700 + 0.5 * n, (1000, 1050, 1100, 1200))
    cost = with_peaks(COST, alike, GPUS, 1)
    assert cost.buffers_mb == 0
    assert cost.mb_per_token == pytest.approx((2300 - 1000) / 1200)
    assert 1000 + cost.mb_per_token * 5000 > 1700 + 0.5 * 5000


def test_the_line_lies_over_every_peak() -> None:
    higher = [*peaks(lambda n: 1700 + 0.5 * n), Peak(3000, 1700 + 0.5 * 3000 + 400)]
    cost = with_peaks(COST, higher, GPUS, 1)
    for peak in higher:
        assert 1000 + cost.buffers_mb + cost.mb_per_token * peak.tokens >= peak.mb - 1e-6


def test_less_than_the_states_is_not_believed() -> None:
    cost = with_peaks(COST, peaks(lambda n: 300 + 0.5 * n), GPUS, 1)
    assert cost.buffers_mb == 0
    assert cost.capacity(GPUS) == pytest.approx((10_000 - 1000 - 500) / 0.5, abs=1)


@pytest.mark.parametrize(
    "few",
    [
        [],
        peaks(lambda n: 1700 + 0.5 * n, TOKENS[:3]),
        peaks(lambda n: 0.5 * n, (1000, 1100, 1200, 1300)),  # less than the states
        peaks(lambda n: 3000.0),  # nothing that grows
        peaks(lambda n: 5000 - 0.5 * n),
    ],
    ids=["none", "few", "alike", "level", "falling"],
)
def test_peaks_that_do_not_tell_leave_the_terms(few: list[Peak]) -> None:
    assert with_peaks(COST, few, GPUS, 1) == COST


def test_a_capacity_that_was_given_holds() -> None:
    given = COST.with_capacity(777)
    assert with_peaks(given, peaks(lambda n: 9000 + 5.0 * n), GPUS, 1) == given


def test_the_longest_sequence_stays_possible() -> None:
    cost = with_peaks(COST, peaks(lambda n: 9000 + 5.0 * n), GPUS, 2000)
    assert cost.capacity(GPUS) == 2000


def test_what_had_no_room_does_not_get_it_from_being_wanted() -> None:
    assert COST.capacity(GPUS) == 8500
    learned = with_peaks(COST, peaks(lambda n: 1700 + 5.0 * n), GPUS, 9000)
    assert learned.capacity(GPUS) == pytest.approx((10_000 - 1000 - 700 - 500) / 5, abs=1)
    roomier = with_peaks(COST, peaks(lambda n: 1700 + 0.5 * n), GPUS, 9000)
    assert roomier.capacity(GPUS) > 9000


def test_what_was_learned_goes_into_the_next_membership() -> None:
    calibrator = Calibrator(COST, range(GPUS))
    for n in TOKENS:
        spans = tuple(Span(rank, 0, 1, n, n * n, 1, 0.01 * n, 0.0) for rank in range(GPUS))
        calibrator.observe(StepSpans(spans, 0.01 * n, peaks=(Peak(n, 1700 + 0.5 * n),)))
    calibrator.fit()
    two = calibrator.on(COST, range(2), least_tokens=3000)
    assert two.cost.capacity(2) == pytest.approx((10_000 - 2000 - 700 - 500) / 0.5, abs=1)
