from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexray.datasets.corpus import Corpus
from flexray.datasets.documents import Documents, OverLength
from flexray.datasets.errors import CorpusError

WriteCorpus = Callable[..., Path]
Row = tuple[list[int], list[int]]

row = st.lists(st.tuples(st.integers(0, 999), st.booleans()), max_size=12)


def expected(rows: list[Row], max_length: int, policy: OverLength) -> list[Row]:
    """The policies, written the plain way."""
    out: list[Row] = []
    for tokens, labels in rows:
        if len(tokens) <= max_length:
            pieces = [(tokens, labels)] if tokens else []
        elif policy == "drop":
            pieces = []
        elif policy == "truncate":
            pieces = [(tokens[:max_length], labels[:max_length])]
        else:
            starts = range(0, len(tokens), max_length)
            pieces = [(tokens[i : i + max_length], labels[i : i + max_length]) for i in starts]
        out += pieces
    return out


def learned(rows: list[Row]) -> int:
    return sum(label != -100 for _, labels in rows for label in labels[1:])


@given(
    rows=st.lists(row, min_size=1, max_size=30),
    max_length=st.integers(1, 13),
    policy=st.sampled_from(["drop", "truncate", "split"]),
    labelled=st.booleans(),
)
@settings(deadline=None, max_examples=80)
def test_policies_against_the_plain_way(
    write_corpus: WriteCorpus,
    rows: list[list[tuple[int, bool]]],
    max_length: int,
    policy: OverLength,
    labelled: bool,
) -> None:
    source: list[Row] = [
        ([t for t, _ in r], [t if keep or not labelled else -100 for t, keep in r]) for r in rows
    ]
    wanted = expected(source, max_length, policy)
    with tempfile.TemporaryDirectory() as tmp:
        folder = write_corpus(
            Path(tmp) / "c", [t for t, _ in source], [x for _, x in source] if labelled else None
        )
        if not any(rows):
            with pytest.raises(CorpusError, match="lengths are 0"):
                Corpus.open(folder)
            return
        corpus = Corpus.open(folder)
        if not wanted:
            with pytest.raises(CorpusError, match="no row is left"):
                Documents(corpus, max_length, policy)
            return
        view = Documents(corpus, max_length, policy)
        assert view.rows == len(wanted)
        assert view.lengths.tolist() == [len(tokens) for tokens, _ in wanted]
        assert view.label_tokens.tolist() == [learned([document]) for document in wanted]
        for i, (tokens, labels) in enumerate(wanted):
            read_tokens, read_labels = view.read(i)
            assert read_tokens.tolist() == tokens
            assert (read_labels is not None) == labelled
            assert read_labels is None or read_labels.tolist() == labels
        over = [r for r in source if len(r[0]) > max_length]
        report = view.report
        assert report.rows == len(wanted)
        assert report.zero_length_rows == sum(not t for t, _ in source)
        assert report.dropped_rows == (len(over) if policy == "drop" else 0)
        assert report.truncated_rows == (len(over) if policy == "truncate" else 0)
        assert report.split_rows == (len(over) if policy == "split" else 0)
        pieces = sum(-(-len(tokens) // max_length) for tokens, _ in over)
        assert report.pieces == (pieces if policy == "split" else 0)
        kept = sum(len(tokens) for tokens, _ in wanted)
        assert report.lost_tokens == sum(len(tokens) for tokens, _ in source) - kept
        assert report.lost_label_tokens == learned(source) - learned(wanted)


@pytest.fixture
def corpus(tmp_path: Path, write_corpus: WriteCorpus) -> Corpus:
    return Corpus.open(write_corpus(tmp_path / "c", [[1] * n for n in (3, 9, 4, 12, 5)]))


def test_error_names_row_length_limit_and_remedy(corpus: Corpus) -> None:
    with pytest.raises(CorpusError) as caught:
        Documents(corpus, 8, "error")
    for needle in ("row 1 has 9 tokens", "max_length 8", "2 of 5 rows", "longest 12", "split"):
        assert needle in str(caught.value)
    assert Documents(corpus, 12, "error").rows == 5


def test_no_row_is_left(corpus: Corpus) -> None:
    with pytest.raises(CorpusError, match=r"no row is left.*1 to 2 tokens.*raise max_length"):
        Documents(corpus, 2, "drop")


@pytest.mark.parametrize("policy", get_args(OverLength))
def test_unchanged_corpus_is_not_copied(corpus: Corpus, policy: OverLength) -> None:
    view = Documents(corpus, 12, policy)
    assert view.lengths is corpus.lengths
    assert view.label_tokens is corpus.label_tokens
    assert view.report.lost_tokens == view.report.lost_label_tokens == 0


def test_same_view_on_the_other_side_of_a_pickle(corpus: Corpus) -> None:
    view = Documents(corpus, 5, "split")
    other = pickle.loads(pickle.dumps(view))
    assert len(pickle.dumps(view)) < 1000
    assert other.report == view.report
    assert [x[0].tolist() for x in map(other.read, range(view.rows))] == [
        x[0].tolist() for x in map(view.read, range(view.rows))
    ]


@pytest.mark.parametrize("row", [-1, 8, np.int64(-8)])
def test_row_ids_outside_the_view_raise(corpus: Corpus, row: int) -> None:
    view = Documents(corpus, 5, "split")
    assert view.rows == 8
    with pytest.raises(IndexError, match=f"row {row} .* 0 to 7"):
        view.read(row)


def test_settings_that_make_no_sense(corpus: Corpus) -> None:
    with pytest.raises(CorpusError, match="max_length must be at least 1, not 0"):
        Documents(corpus, 0, "drop")
    with pytest.raises(CorpusError, match="'cut'; choose one of error, drop, truncate, split"):
        Documents(corpus, 5, "cut")  # type: ignore[arg-type]
