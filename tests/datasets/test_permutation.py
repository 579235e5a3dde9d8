"""A seeded order that takes no memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexray.datasets.permutation import Permutation

seeds = st.integers(0, 2**63)


@given(size=st.integers(1, 3000), seed=seeds, epoch=st.integers(0, 1000))
@settings(deadline=None)
def test_permutation_is_a_bijection(size: int, seed: int, epoch: int) -> None:
    order = Permutation(size, seed, epoch)(np.arange(size))
    assert np.array_equal(np.sort(order), np.arange(size))


@given(size=st.integers(1, 2**40), seed=seeds, data=st.data())
@settings(deadline=None)
def test_permutation_has_random_access(size: int, seed: int, data: st.DataObject) -> None:
    positions = np.array(data.draw(st.lists(st.integers(0, size - 1), max_size=20)), np.int64)
    order = Permutation(size, seed, 0)
    together = order(positions)
    assert [int(order(positions[i : i + 1])[0]) for i in range(len(positions))] == together.tolist()
    assert ((together >= 0) & (together < size)).all()
    assert len(set(together.tolist())) == len(set(positions.tolist()))


def chi_squared(counts: np.ndarray) -> float:
    """In standard deviations above what equal chances give."""
    expected, freedom = counts.mean(), counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


@pytest.mark.parametrize("size", [2, 3, 16, 17, 200])
def test_every_row_is_equally_often_everywhere(size: int) -> None:
    orders = np.array([Permutation(size, seed, 0)(np.arange(size)) for seed in range(1000)])
    for position in {0, size // 2, size - 1}:
        assert chi_squared(np.bincount(orders[:, position], minlength=size)) < 5


def test_all_orders_are_equally_often() -> None:
    orders = [tuple(Permutation(4, seed, 0)(np.arange(4)).tolist()) for seed in range(2400)]
    counts = np.array([orders.count(order) for order in set(orders)])
    assert counts.size == 24
    assert chi_squared(counts) < 5


def test_neighbours_are_independent() -> None:
    size = 100_000
    order = Permutation(size, 0, 0)(np.arange(size)).astype(float)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 5 / np.sqrt(size)
    assert abs(np.corrcoef(order, np.arange(size))[0, 1]) < 5 / np.sqrt(size)


def test_the_order_is_the_same_on_every_machine() -> None:
    """Resuming elsewhere relies on it: changing these numbers breaks saved runs."""
    assert Permutation(10, 0, 0)(np.arange(10)).tolist() == [9, 8, 6, 7, 2, 5, 1, 4, 0, 3]
    first = Permutation(10**9, 7, 3)(np.arange(4))
    assert first.tolist() == [398570460, 467944485, 850074578, 24916921]


def test_a_hundred_million_rows() -> None:
    """Where a row goes depends neither on where it was nor on where its neighbours go."""
    size, cells, samples = 10**8, 16, 200_000
    draw = np.random.default_rng(0)
    for epoch in range(3):
        order = Permutation(size, 7, epoch)
        positions = draw.integers(0, size - 1, samples)
        rows, after = order(positions), order(positions + 1)
        for a, b in ((positions, rows), (rows, after), (positions % cells, rows % cells)):
            scale = cells if a.max() < cells else size
            both = np.bincount(a * cells // scale * cells + b * cells // scale, minlength=cells**2)
            assert chi_squared(both) < 5


def test_orders_of_streams_and_epochs_are_others() -> None:
    keys = [(0, 0, 0), (0, 1, 0), (1, 0, 0), (0, 0, 1), (0, 1, 1), (2**40, 0, 0)]
    orders = {tuple(Permutation(1000, *key)(np.arange(1000)).tolist()) for key in keys}
    assert len(orders) == len(keys)
