"""One cursor over one corpus: epochs, batches by sequences and by tokens, resume."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexray.datasets.errors import CorpusError
from flexray.datasets.sampler import Sampler, Stream

seeds = st.integers(0, 2**63)


def of_sequences(rows: int, batch: int, seed: int = 3) -> Sampler:
    return Sampler([Stream(rows)], seed, batch_sequences=batch)


def of_tokens(lengths: list[int], budget: int, seed: int = 3) -> Sampler:
    array = np.array(lengths, np.int32)
    return Sampler([Stream(len(lengths))], seed, batch_tokens=budget, lengths=array)


def saved(sampler: Sampler) -> dict[str, Any]:
    """As a checkpoint keeps it."""
    state: dict[str, Any] = json.loads(json.dumps(sampler.state_dict()))
    return state


@given(rows=st.integers(1, 60), batch=st.integers(1, 70), seed=seeds, held_out=st.integers(0, 59))
@settings(deadline=None)
def test_epochs_are_exact(rows: int, batch: int, seed: int, held_out: int) -> None:
    stream = Stream(rows, min(held_out, rows - 1))
    sampler = Sampler([stream], seed, batch_sequences=batch)
    sizes = [min(batch, stream.trained - start) for start in range(0, stream.trained, batch)]
    trained = np.setdiff1d(np.arange(rows), stream.held_out_rows())
    assert len(trained) == stream.trained
    for epoch in range(4):
        assert sampler.epochs == (epoch,)
        batches = [sampler.next() for _ in sizes]
        assert [len(b) for b in batches] == sizes
        assert np.array_equal(np.sort(np.concatenate(batches)), trained)


@given(
    rows=st.integers(1, 12),
    batch=st.integers(1, 15),
    other=st.integers(1, 15),
    seed=seeds,
)
@settings(deadline=None, max_examples=40)
def test_saved_at_every_step(rows: int, batch: int, other: int, seed: int) -> None:
    """Resumed with the same batches the rows come in the same order; with others, the same rows."""
    steady = of_sequences(rows, batch, seed)
    states, dealt = [saved(steady)], [np.empty(0, np.int64)]
    while steady.epochs[0] < 3:
        dealt.append(steady.next())
        states.append(saved(steady))
    everything = np.concatenate(dealt)
    assert np.array_equal(np.bincount(everything), np.full(rows, 3))
    for step, state in enumerate(states):
        for size in (batch, other):
            resumed, rest = of_sequences(rows, size, seed), np.concatenate(dealt[: step + 1])
            resumed.load_state_dict(state)
            while resumed.epochs[0] < 3:
                rest = np.append(rest, resumed.next())
            assert np.array_equal(rest, everything)


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=150),
    budget=st.one_of(st.integers(1, 100), st.integers(1, 2000)),
    seed=seeds,
)
@settings(deadline=None, max_examples=60)
def test_batches_by_tokens(lengths: list[int], budget: int, seed: int) -> None:
    """As the definition has it, from the order that batches of one sequence come in."""
    one_by_one = of_sequences(len(lengths), 1, seed)
    order = [int(one_by_one.next()[0]) for _ in range(2 * len(lengths))]
    wanted: list[list[int]] = []
    for epoch in (order[: len(lengths)], order[len(lengths) :]):
        batch: list[int] = []
        for row in epoch:
            if batch and sum(lengths[i] for i in [*batch, row]) > budget:
                wanted.append(batch)
                batch = []
            batch.append(row)
        wanted.append(batch)  # what is left of the epoch

    sampler = of_tokens(lengths, budget, seed)
    states = []
    for batch in wanted:
        states.append(saved(sampler))
        assert sampler.next().tolist() == batch
    assert sampler.epochs == (2,)
    for state, batch in zip(states, wanted, strict=True):
        resumed = of_tokens(lengths, budget, seed)
        resumed.load_state_dict(state)
        assert resumed.next().tolist() == batch


def test_a_budget_may_be_met_exactly() -> None:
    sampler = of_tokens([5] * 200, budget=20)
    assert [len(sampler.next()) for _ in range(50)] == [4] * 50
    assert [len(of_tokens([5] * 200, budget=b).next()) for b in (19, 21, 999)] == [3, 4, 199]


def test_a_sequence_over_the_budget_is_a_batch_of_its_own() -> None:
    for seed in range(10):
        sampler = of_tokens([5, 100, 5, 5], budget=20, seed=seed)
        batches = []
        while sampler.epochs == (0,):
            batches.append(sampler.next().tolist())
        assert [1] in batches
        assert sorted(row for batch in batches for row in batch) == [0, 1, 2, 3]


def test_token_batches_are_full_to_within_one_sequence() -> None:
    lengths = np.random.default_rng(0).lognormal(5, 1, 20_000).astype(np.int32) + 1
    sampler = Sampler([Stream(20_000)], 0, batch_tokens=300_000, lengths=lengths)
    batches = []
    while sampler.epochs == (0,):
        batches.append(int(lengths[sampler.next()].sum()))
    assert max(batches) <= 300_000
    assert min(batches[:-1]) > 300_000 - lengths.max()
    assert sum(batches) == lengths.sum()


def test_epochs_differ_in_order() -> None:
    sampler = of_sequences(1000, 1000, seed=0)
    orders = [tuple(sampler.next().tolist()) for _ in range(5)]
    assert len(set(orders)) == 5
    assert tuple(of_sequences(1000, 1000, seed=1).next().tolist()) not in orders


def test_state_and_time_do_not_grow_with_the_rows() -> None:
    rows = 10**12
    sampler = of_sequences(rows, 512, 0)
    sampler.load_state_dict(sampler.state_dict() | {"draws": rows - 1000})
    started = time.perf_counter()
    assert [len(sampler.next()) for _ in range(2)] == [512, 488]
    assert time.perf_counter() - started < 0.5
    assert sampler.epochs == (1,)
    assert len(json.dumps(sampler.state_dict())) < 150


def test_held_out_rows_are_the_same_for_every_seed_and_spread() -> None:
    stream = Stream(100_000, 5_000)
    held_out = stream.held_out_rows()
    assert len(np.unique(held_out)) == 5_000
    counts = np.bincount(held_out // 10_000, minlength=10)
    assert counts.min() > 430
    assert counts.max() < 570
    for seed in (0, 1):
        sampler = Sampler([stream], seed, batch_sequences=95_000)
        assert not np.isin(held_out, sampler.next()).any()


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"corpora": {"0": vars(Stream(120))}}, "rows of corpus 0 120 and this run has 100"),
        ({"corpora": {"0": vars(Stream(100, 5))}}, "held_out of corpus 0 5 and this run has 0"),
        ({"corpora": {"0": {"rows": 100, "corpus": 0}}}, "held_out of corpus 0 None and this run"),
        ({"corpora": {"0": vars(Stream(100, corpus=7))}}, "corpus 0 holds other data than when"),
        (
            {"corpora": {"0": vars(Stream(100)), "1": vars(Stream(5))}},
            "saved with 2 corpora and this run has 1; resume with",
        ),
        ({"corpora": {}}, "saved with 0 corpora and this run has 1"),
        ({"corpora": 5}, "not a sampler state"),
        ({"corpora": {"0": 5}}, "not a sampler state: its corpora are {'0': 5}"),
        ({"seed": 4}, "seed 4 and this run has 3; resume with the same corpora, weights"),
        ({"draws": -1}, "counts -1 sequences"),
        ({"draws": 1.0}, r"counts 1\.0 sequences"),
        ({"draws": 2**62}, "counts 4611686018427387904 sequences"),
        ({"world": 8}, "not a sampler state"),
    ],
)
def test_states_that_do_not_fit(state: dict[str, Any], message: str) -> None:
    sampler = of_sequences(100, 8)
    sampler.next()
    before = saved(sampler)
    with pytest.raises(CorpusError, match=message) as caught:
        sampler.load_state_dict(sampler.state_dict() | state)
    assert "\n" not in str(caught.value)
    assert saved(sampler) == before


LENGTHS = np.ones(1, np.int32)


@pytest.mark.parametrize(
    ("streams", "seed", "batch", "message"),
    [
        ([], 0, {"batch_sequences": 1}, "cannot sample from 0 rows"),
        ([Stream(0)], 0, {"batch_sequences": 1}, "cannot sample from 0 rows"),
        ([Stream(5, 5)], 0, {"batch_sequences": 1}, "cannot sample from 0 rows"),
        ([Stream(1)], -1, {"batch_sequences": 1}, "the seed must be 0 or more, not -1"),
        ([Stream(1)], 0, {"batch_sequences": 0}, "at least 1 sequence, not 0"),
        ([Stream(1)], 0, {"batch_tokens": 0, "lengths": LENGTHS}, "at least 1 token, not 0"),
        ([Stream(1)], 0, {}, "so many sequences, or so many tokens"),
        ([Stream(1)], 0, {"batch_tokens": 5}, "so many sequences, or so many tokens"),
        ([Stream(1, weight=0)], 0, {"batch_sequences": 1}, "weights must be 1 or more"),
    ],
)
def test_settings_that_make_no_sense(
    streams: list[Stream], seed: int, batch: dict[str, Any], message: str
) -> None:
    with pytest.raises(CorpusError, match=message):
        Sampler(streams, seed, **batch)


def test_one_row() -> None:
    sampler = of_sequences(1, 4)
    assert [sampler.next().tolist() for _ in range(3)] == [[0], [0], [0]]
