"""What of a corpus is trained on: an over-length policy applied without rewriting anything."""

from __future__ import annotations

import dataclasses
import operator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from flexray.datasets.corpus import Corpus
from flexray.datasets.errors import CorpusError
from flexray.datasets.writer import count_label_tokens

OverLength = Literal["error", "drop", "truncate", "split"]


@dataclass(frozen=True)
class LengthReport:
    """What the policy did; all counts are over one epoch.

    `pieces` are the documents that the `split_rows` became. `lost_tokens` are the tokens that
    are never read (dropped rows, cut ends); `lost_label_tokens` also counts the first token of
    every further piece, which nothing predicts.
    """

    over_length: OverLength
    max_length: int
    rows: int = 0
    zero_length_rows: int = 0
    dropped_rows: int = 0
    truncated_rows: int = 0
    split_rows: int = 0
    pieces: int = 0
    lost_tokens: int = 0
    lost_label_tokens: int = 0

    def as_dict(self) -> dict[str, int | str]:
        """Plain values, for logs and metrics."""
        return dataclasses.asdict(self)


class Documents:
    """The sequences of a corpus, none longer than `max_length` tokens.

    A row id here is a position in this view. The same corpus, `max_length` and policy give the
    same rows everywhere, so the driver plans with `lengths` and actors `read` by row id. Rows
    without tokens are left out and counted. Only rows that the policy touches take memory.

    Policies for longer rows: "error" refuses the corpus, "drop" leaves them out, "truncate"
    keeps their first `max_length` tokens, "split" cuts them into pieces of `max_length` (the last
    may be shorter), each a document of its own.

    Attributes:
        report: what was dropped, cut and split.

    Raises:
        CorpusError: a row is over-long under "error", or no row is left.
    """

    def __init__(self, corpus: Corpus, max_length: int, over_length: OverLength) -> None:
        if max_length < 1:
            raise CorpusError(f"max_length must be at least 1, not {max_length}")
        if over_length not in get_args(OverLength):
            raise CorpusError(
                f"over_length is {over_length!r}; choose one of {', '.join(get_args(OverLength))}"
            )
        self.corpus, self.max_length, self.over_length = corpus, max_length, over_length
        lengths = corpus.lengths
        # The exceptions: rows that do not appear in this view exactly once and whole.
        self._changed = np.flatnonzero((lengths > max_length) | (lengths == 0))
        changed_lengths = lengths[self._changed].astype(np.int64)
        over = changed_lengths > max_length
        if over_length == "error" and over.any():
            row, length = int(self._changed[over][0]), int(changed_lengths[over][0])
            raise CorpusError(
                f"{corpus.path}: row {row} has {length} tokens, more than max_length {max_length} "
                f"(so have {over.sum()} of {corpus.rows} rows, the longest {lengths.max()}); "
                "raise max_length or choose over_length drop, truncate or split"
            )
        self._pieces = np.zeros(len(self._changed), np.int64)
        if over_length == "truncate":
            self._pieces[over] = 1
        elif over_length == "split":
            self._pieces[over] = -(-changed_lengths[over] // max_length)
        # View row = corpus row + shift of the exceptions before it.
        self._shift = np.cumsum(self._pieces - 1)
        self._first = self._changed + self._shift - (self._pieces - 1)
        self.rows = corpus.rows + (int(self._shift[-1]) if len(self._shift) else 0)
        if not self.rows:
            raise CorpusError(
                f"{corpus.path}: no row is left: none has 1 to {max_length} tokens; "
                "raise max_length or choose over_length truncate or split"
            )
        self._piece_lengths, self._piece_labels = self._measure_pieces(changed_lengths)
        self.report = self._make_report(changed_lengths, over)

    def __reduce__(self) -> tuple[type[Documents], tuple[Corpus, int, OverLength]]:
        return Documents, (self.corpus, self.max_length, self.over_length)

    @cached_property
    def lengths(self) -> npt.NDArray[np.int32]:
        """(rows,) tokens of each document."""
        return self._view(self.corpus.lengths, self._piece_lengths)

    @cached_property
    def label_tokens(self) -> npt.NDArray[np.int32]:
        """(rows,) labels of each document after its own shift."""
        return self._view(self.corpus.label_tokens, self._piece_labels)

    def read(self, row: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32] | None]:
        """Token ids and unshifted labels (None: every token is one) of a document, (length,) each.

        Both are read-only views of the mapped file.

        Raises:
            IndexError: `row` is not in [0, rows).
        """
        row = operator.index(row)
        if not 0 <= row < self.rows:
            raise IndexError(f"row {row} is not in this view: its rows are 0 to {self.rows - 1}")
        source, piece = self._locate(row)
        tokens, labels = self.corpus.tokens(source), self.corpus.labels(source)
        cut = slice(piece * self.max_length, (piece + 1) * self.max_length)
        return tokens[cut], None if labels is None else labels[cut]

    def _locate(self, row: int) -> tuple[int, int]:
        """The corpus row behind a view row, and which piece of it the view row is."""
        # Dropped rows share their `_first` with what follows them, so the last match counts.
        i = int(np.searchsorted(self._first, row, side="right")) - 1
        if i < 0:
            return row, 0
        piece = row - int(self._first[i])
        if piece < self._pieces[i]:
            return int(self._changed[i]), piece
        return row - int(self._shift[i]), 0

    def _measure_pieces(
        self, changed_lengths: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Lengths and label tokens of all pieces, in order."""
        total = int(self._pieces.sum())
        owner = np.repeat(np.arange(len(self._pieces)), self._pieces)
        index = np.arange(total) - np.repeat(np.cumsum(self._pieces) - self._pieces, self._pieces)
        left = changed_lengths[owner] - index * self.max_length
        lengths = np.minimum(left, self.max_length).astype(np.int32)
        if not self.corpus.has_labels:
            return lengths, lengths - 1
        counts = [
            count_label_tokens(*self._cut_labels(int(row), int(pieces)))
            for row, pieces in zip(self._changed, self._pieces, strict=True)
            if pieces
        ]
        return lengths, np.concatenate(counts) if counts else np.empty(0, np.int32)

    def _cut_labels(
        self, row: int, pieces: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32] | None]:
        """Where the pieces of a corpus row begin and end, and the labels that they cover."""
        labels = self.corpus.labels(row)
        end = min(int(self.corpus.lengths[row]), pieces * self.max_length)
        return np.append(np.arange(pieces) * self.max_length, end), labels

    def _view(
        self, column: npt.NDArray[np.int32], pieces: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.int32]:
        """A corpus column as this view has it; the corpus's own array if nothing changes."""
        if not len(self._changed):
            return column
        whole = np.ones(self.rows, bool)
        first = np.repeat(self._first, self._pieces)
        before = np.repeat(np.cumsum(self._pieces) - self._pieces, self._pieces)
        whole[first + np.arange(len(pieces)) - before] = False
        view = np.empty(self.rows, np.int32)
        view[~whole] = pieces
        view[whole] = np.delete(column, self._changed)
        return view

    def _make_report(
        self, changed_lengths: npt.NDArray[np.int64], over: npt.NDArray[np.bool_]
    ) -> LengthReport:
        rows_over, policy = int(over.sum()), self.over_length
        had_labels = self.corpus.label_tokens[self._changed].sum(dtype=np.int64)
        return LengthReport(
            over_length=policy,
            max_length=self.max_length,
            rows=self.rows,
            zero_length_rows=len(over) - rows_over,
            dropped_rows=rows_over if policy == "drop" else 0,
            truncated_rows=rows_over if policy == "truncate" else 0,
            split_rows=rows_over if policy == "split" else 0,
            pieces=int(self._pieces.sum()) if policy == "split" else 0,
            lost_tokens=int(changed_lengths.sum() - self._piece_lengths.sum(dtype=np.int64)),
            lost_label_tokens=int(had_labels - self._piece_labels.sum(dtype=np.int64)),
        )
