"""Rows of several corpora, numbered through: reading, holding out, weights, resume."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexray.datasets.corpus import Corpus
from flexray.datasets.data_source import DataSource
from flexray.datasets.documents import Documents
from flexray.datasets.errors import CorpusError
from flexray.datasets.mixture import Mixture
from flexray.datasets.sampler import Sampler, Stream

WriteCorpus = Callable[..., Path]


@pytest.fixture
def folders(tmp_path: Path, write_corpus: WriteCorpus) -> list[Path]:
    """Three corpora; the first token of row i of corpus c is 100 c + i; the third has labels."""
    rows = [[[100 * c + i] * (1 + i) for i in range(n)] for c, n in enumerate((10, 4, 6))]
    return [
        write_corpus(tmp_path / name, rows[i], rows[2] if name == "c" else None)
        for i, name in enumerate("abc")
    ]


def source(
    folders: list[Path], weights: tuple[float, ...], validation: Path | int = 0
) -> DataSource:
    return DataSource(tuple(folders), 5, "split", weights, validation)


def test_rows_are_numbered_through(folders: list[Path]) -> None:
    parts = [Documents(Corpus.open(folder), 5, "split") for folder in folders]
    mixture = source(folders[:2], (1, 1), folders[2]).open()
    wanted = [part.read(row) for part in parts for row in range(part.rows)]
    assert mixture.rows == len(wanted) == 15 + 4 + 7
    assert mixture.lengths.tolist() == [len(tokens) for tokens, _ in wanted]
    assert mixture.label_tokens.tolist() == [len(tokens) - 1 for tokens, _ in wanted]
    for row, (tokens, labels) in enumerate(wanted):
        got_tokens, got_labels = mixture.read(row)
        assert got_tokens.tolist() == tokens.tolist()
        assert (got_labels is None) == (labels is None) == (row < 19)
    for row in (-1, 26):
        with pytest.raises(IndexError, match=f"row {row} .* 0 to 25"):
            mixture.read(row)
    assert [part.report for part in mixture.parts] == [part.report for part in parts]


def test_one_corpus_is_not_copied(folders: list[Path]) -> None:
    mixture = source(folders[:1], (1,)).open()
    assert mixture.lengths is mixture.parts[0].lengths
    assert len(mixture.validation_rows) == 0


def test_lengths_are_held_once(folders: list[Path]) -> None:
    mixture = source(folders, (1, 1, 1)).open()
    for column in ("lengths", "label_tokens"):
        joined = getattr(mixture, column)
        assert all(np.shares_memory(joined, getattr(part, column)) for part in mixture.parts)


def test_a_validation_corpus_comes_last_and_is_never_dealt(folders: list[Path]) -> None:
    mixture = source(folders[:2], (3, 1), folders[2]).open()
    assert mixture.validation_rows.tolist() == list(range(19, 26))
    assert [(s.rows, s.held_out, s.weight) for s in mixture.streams] == [(15, 0, 3), (4, 0, 1)]
    sampler = Sampler(mixture.streams, 0, batch_sequences=50)
    assert set(sampler.next().tolist()) == set(range(19))


@pytest.mark.parametrize("count", [1, 6, 11])
def test_sequences_are_held_out_by_weight(folders: list[Path], count: int) -> None:
    mixture = source(folders[:2], (3, 1), count).open()
    held_out = mixture.validation_rows
    assert len(np.unique(held_out)) == count
    assert abs((held_out < 15).sum() - count * 3 / 4) <= 0.5
    sampler = Sampler(mixture.streams, 0, batch_sequences=100)
    assert set(sampler.next().tolist()) == set(range(19)) - set(held_out.tolist())


def test_same_rows_on_the_other_side_of_a_pickle(folders: list[Path]) -> None:
    where = pickle.loads(pickle.dumps(source(folders[:2], (3, 1), 6)))
    assert where.open().validation_rows.tolist() == (
        source(folders[:2], (3, 1), 6).open().validation_rows.tolist()
    )
    mixture = source(folders, (1, 1, 1)).open()
    other = pickle.loads(pickle.dumps(mixture))
    assert other.lengths.tolist() == mixture.lengths.tolist()


def refuse(message: str, where: DataSource) -> None:
    with pytest.raises(CorpusError) as caught:
        where.open()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_mixed(folders: list[Path], tmp_path: Path) -> None:
    refuse(f"{folders[0]}: is given twice", source([folders[0], folders[0]], (1, 1)))
    refuse(f"{folders[0]}: is given twice", source(folders[:1], (1,), folders[0]))
    (tmp_path / "link").symlink_to(folders[0])
    refuse("link: is given twice", source([folders[0], tmp_path / "link"], (1, 1)))
    refuse("has 4 sequences, and 4 are to be held out", source(folders[:2], (1, 1), 8))
    refuse(f"{folders[1]}: its weight is less than a millionth", source(folders[:2], (1, 1e-9)))
    manifest = json.loads((folders[1] / "manifest.json").read_text())
    manifest["tokenizer"] = {"name": "other", "sha256": "1"}
    (folders[1] / "manifest.json").write_text(json.dumps(manifest))
    refuse(f"made by tokenizer other and {folders[0]} by test", source(folders, (1, 1, 1)))
    refuse("made by tokenizer other", source(folders[:1], (1,), folders[1]))


def test_a_corpus_that_was_made_again_is_not_gone_on_with(folders: list[Path]) -> None:
    """Its rows are as many as before, and others."""
    saved = Sampler(source(folders, (1, 1, 1)).open().streams, 0, batch_sequences=4).state_dict()
    manifest = json.loads((folders[1] / "manifest.json").read_text())
    manifest["files"][0]["sha256"] = "other"
    (folders[1] / "manifest.json").write_text(json.dumps(manifest))
    sampler = Sampler(source(folders, (1, 1, 1)).open().streams, 0, batch_sequences=4)
    with pytest.raises(CorpusError, match="corpus 1 holds other data than when"):
        sampler.load_state_dict(saved)
    moved = [folder.rename(folder.with_name(f"moved-{folder.name}")) for folder in folders]
    sampler.load_state_dict(
        Sampler(source(moved, (1, 1, 1)).open().streams, 0, batch_sequences=4).state_dict()
    )


@given(
    streams=st.lists(
        st.builds(Stream, st.integers(3, 9), st.integers(0, 2), st.integers(1, 5)),
        min_size=2,
        max_size=4,
    ),
    batch=st.integers(2, 15),
    seed=st.integers(0, 2**63),
    budget=st.integers(5, 60),
)
@settings(deadline=None, max_examples=6)
def test_resume_of_a_mixture_at_every_step(
    streams: list[Stream], batch: int, seed: int, budget: int
) -> None:
    lengths = np.arange(sum(s.rows for s in streams), dtype=np.int32) % 7 + 1

    def make(tokens: bool) -> Sampler:
        if tokens:
            return Sampler(streams, seed, batch_tokens=budget, lengths=lengths)
        return Sampler(streams, seed, batch_sequences=batch)

    for tokens in (False, True):
        steady, states, ends, dealt = make(tokens), [], [], np.empty(0, np.int64)
        while min(steady.epochs) < 1:  # every corpus gets past the end of its first epoch
            states.append(json.loads(json.dumps(steady.state_dict())))
            ends.append(len(dealt))
            dealt = np.append(dealt, steady.next())
        for state, end in zip(states, ends, strict=True):
            for resumed in (make(tokens), make(not tokens)):
                resumed.load_state_dict(state)
                rest = np.concatenate([resumed.next(), resumed.next()])
                reach = min(len(rest), len(dealt) - end)
                assert np.array_equal(rest[:reach], dealt[end : end + reach])

        # Each corpus is gone through epoch by epoch, whatever the others do.
        first = 0
        for stream in streams:
            mine = dealt[(dealt >= first) & (dealt < first + stream.rows)] - first
            trained = np.setdiff1d(np.arange(stream.rows), stream.held_out_rows())
            for start in range(0, len(mine) - stream.trained + 1, stream.trained):
                assert np.array_equal(np.sort(mine[start : start + stream.trained]), trained)
            first += stream.rows


def test_every_batch_has_the_proportions() -> None:
    streams = [Stream(1000, weight=7), Stream(50, weight=2), Stream(400, weight=1)]
    sampler = Sampler(streams, 0, batch_sequences=100)
    for _ in range(50):
        owner = np.searchsorted([1000, 1050], sampler.next(), side="right")
        counts = np.bincount(owner, minlength=3)
        assert np.abs(counts - [70, 20, 10]).max() <= 1
    assert sampler.epochs == (3, 20, 1)


def test_mixture_is_a_type_of_rows(folders: list[Path]) -> None:
    """What the driver relies on: gathering by an array of row ids."""
    mixture: Mixture = source(folders, (1, 1, 1)).open()
    rows = Sampler(mixture.streams, 0, batch_sequences=8).next()
    assert rows.dtype == np.int64
    assert mixture.lengths[rows].tolist() == [len(mixture.read(int(row))[0]) for row in rows]
