from __future__ import annotations

import json
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexray.datasets.errors import CorpusError
from flexray.datasets.permutation import Permutation
from flexray.datasets.sampler import Sampler

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


@given(
    rows=st.integers(1, 60),
    batch=st.integers(1, 70),
    seed=seeds,
    stop=st.integers(0, 30),
)
@settings(deadline=None)
def test_resume_anywhere(rows: int, batch: int, seed: int, stop: int) -> None:
    steady = Sampler(rows, batch, seed)
    batches = [steady.next().tolist() for _ in range(stop + 10)]

    stopped = Sampler(rows, batch, seed)
    for _ in range(stop):
        stopped.next()
    state = json.loads(json.dumps(stopped.state_dict()))
    resumed = Sampler(rows, batch, seed)
    resumed.load_state_dict(state)
    assert [resumed.next().tolist() for _ in range(10)] == batches[stop:]


@given(rows=st.integers(1, 60), batch=st.integers(1, 70), seed=seeds)
@settings(deadline=None)
def test_epochs_are_exact(rows: int, batch: int, seed: int) -> None:
    sampler = Sampler(rows, batch, seed)
    sizes = [min(batch, rows - start) for start in range(0, rows, batch)]
    for epoch in range(4):
        assert sampler.epoch == epoch
        batches = [sampler.next() for _ in sizes]
        assert [len(b) for b in batches] == sizes
        assert np.array_equal(np.sort(np.concatenate(batches)), np.arange(rows))


def test_epochs_differ_in_order() -> None:
    sampler = Sampler(1000, 1000, seed=0)
    orders = [tuple(sampler.next().tolist()) for _ in range(5)]
    assert len(set(orders)) == 5
    assert tuple(Sampler(1000, 1000, seed=1).next().tolist()) not in orders


def test_batch_size_may_change_on_resume() -> None:
    first = Sampler(100, 8, 3)
    seen = [i for _ in range(5) for i in first.next().tolist()]
    second = Sampler(100, 30, 3)
    second.load_state_dict(first.state_dict())
    seen += [i for _ in range(2) for i in second.next().tolist()]
    assert sorted(seen) == list(range(100))


def test_state_and_time_do_not_grow_with_the_rows() -> None:
    sampler = Sampler(10**12, 512, 0)
    sampler.load_state_dict(sampler.state_dict() | {"position": 10**12 - 1000})
    started = time.perf_counter()
    assert [len(sampler.next()) for _ in range(2)] == [512, 488]
    assert time.perf_counter() - started < 0.5
    assert sampler.epoch == 1
    assert len(json.dumps(sampler.state_dict())) < 100


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 120}, "saved with rows 120 and this run has 100"),
        ({"seed": 4}, "saved with seed 4 and this run has 3"),
        ({"position": 100}, "position 100; positions are 0 to 99"),
        ({"position": -1}, "position -1"),
        ({"epoch": -1}, "epoch -1"),
        ({"world": 8}, "not a sampler state"),
    ],
)
def test_states_that_do_not_fit(change: dict[str, int], message: str) -> None:
    sampler = Sampler(100, 8, 3)
    with pytest.raises(CorpusError, match=message):
        sampler.load_state_dict(sampler.state_dict() | change)
    assert sampler.state_dict() == Sampler(100, 8, 3).state_dict()


@pytest.mark.parametrize(("rows", "batch", "seed"), [(0, 1, 0), (1, 0, 0), (1, 1, -1)])
def test_settings_that_make_no_sense(rows: int, batch: int, seed: int) -> None:
    with pytest.raises(CorpusError):
        Sampler(rows, batch, seed)


def test_one_row() -> None:
    sampler = Sampler(1, 4, 0)
    assert [sampler.next().tolist() for _ in range(3)] == [[0], [0], [0]]
