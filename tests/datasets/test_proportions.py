"""Draws dealt by weight: exact at any time, found without those before."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexray.datasets.proportions import MAX_DRAWS, RESOLUTION, deal, dealt, whole_weights

weights = st.lists(st.floats(0.001, 1000), min_size=1, max_size=8)


def harmonic(m: int) -> float:
    return sum(1 / i for i in range(1, m + 1))


@given(weights=weights, start=st.integers(0, 10**12))
@settings(deadline=None, max_examples=200)
def test_any_ten_thousand_draws_have_their_shares(weights: list[float], start: int) -> None:
    whole = [w for w in whole_weights(weights) if w]
    shares = np.array(whole) / sum(whole)
    party, before = deal(np.arange(start, start + 10_000), whole)
    counts = np.bincount(party, minlength=len(whole))
    assert np.abs(counts / 10_000 - shares).max() <= 0.005
    assert np.abs(counts - shares * 10_000).max() <= 1 + harmonic(len(whole)) + 1e-3
    for i in range(len(whole)):
        assert np.array_equal(before[party == i], dealt(start, whole)[i] + np.arange(counts[i]))
    assert dealt(start + 10_000, whole) == (np.array(dealt(start, whole)) + counts).tolist()


@given(weights=weights)
@settings(deadline=None)
def test_nobody_is_ever_far_from_its_share(weights: list[float]) -> None:
    whole = [w for w in whole_weights(weights) if w]
    shares = np.array(whole) / sum(whole)
    party, _ = deal(np.arange(5000), whole)
    counts = np.cumsum(party[:, None] == np.arange(len(whole)), axis=0)
    off = np.abs(counts - shares * np.arange(1, 5001)[:, None])
    assert off.max() <= (1 + harmonic(len(whole))) / 2 + 1e-6


@given(weights=weights, draw=st.integers(0, MAX_DRAWS - 1))
@settings(deadline=None)
def test_random_access(weights: list[float], draw: int) -> None:
    whole = [w for w in whole_weights(weights) if w]
    (party,), (before,) = deal(np.array([draw]), whole)
    had, has = dealt(draw, whole), dealt(draw + 1, whole)
    assert sum(had) == draw
    assert before == had[party]
    assert [b - a for a, b in zip(had, has, strict=True)] == [
        int(i == party) for i in range(len(whole))
    ]


@pytest.mark.parametrize(
    ("weights", "whole"),
    [
        ([0.7, 0.3], (7, 3)),
        ([1, 1, 2], (1, 1, 2)),
        ([5.0], (1,)),
        ([1e300, 1e300], (1, 1)),
        ([1e308, 1e308, 5e307], (2, 2, 1)),
        ([5e-324, 5e-324], (1, 1)),
        ([1, 1e-9], (1, 0)),
    ],
)
def test_whole_weights(weights: list[float], whole: tuple[int, ...]) -> None:
    assert whole_weights(weights) == whole


@given(weights=weights)
def test_whole_weights_keep_to_the_resolution(weights: list[float]) -> None:
    whole = whole_weights(weights)
    for weight, number in zip(weights, whole, strict=True):
        assert abs(weight / sum(weights) - number / sum(whole)) < 5 / RESOLUTION


def test_the_deal_is_the_same_on_every_machine() -> None:
    """Resuming elsewhere relies on it: changing these numbers breaks saved runs."""
    party, before = deal(np.arange(10), (7, 2, 1))
    assert party.tolist() == [0, 1, 0, 0, 0, 2, 0, 0, 1, 0]
    assert before.tolist() == [0, 0, 1, 2, 3, 0, 4, 5, 1, 6]
