"""What of a corpus is trained on: an over-length policy applied without rewriting anything."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from flexray.datasets.corpus import Corpus
from flexray.datasets.errors import CorpusError
from flexray.datasets.writer import count_label_tokens

OverLength = Literal["error", "drop", "truncate", "split"]

_BLOCK = 1024  # corpus rows between two entries of the index
_AT_A_TIME = 1 << 18  # corpus rows or documents that are measured together: bounds the memory


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
    without tokens are left out and counted.

    Policies for longer rows: "error" refuses the corpus, "drop" leaves them out, "truncate"
    keeps their first `max_length` tokens, "split" cuts them into pieces of `max_length` (the last
    may be shorter), each a document of its own.

    Memory: an index of 8 bytes for every 1,024 corpus rows; `lengths` and `label_tokens` take 4
    bytes a document each once asked for, nothing where the policy changes no row.

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
        self._zero_rows = int(np.count_nonzero(lengths == 0))
        self._over_rows = int(np.count_nonzero(lengths > max_length))
        if over_length == "error" and self._over_rows:
            row = int((lengths > max_length).argmax())
            raise CorpusError(
                f"{corpus.path}: row {row} has {lengths[row]} tokens, more than max_length "
                f"{max_length} (so have {self._over_rows} of {corpus.rows} rows, the longest "
                f"{lengths.max()}); raise max_length or choose over_length drop, truncate or split"
            )
        self._changed = bool(self._zero_rows or self._over_rows)
        self._starts = self._index()
        self.rows = int(self._starts[-1])
        if not self.rows:
            raise CorpusError(
                f"{corpus.path}: no row is left: none has 1 to {max_length} tokens; "
                "raise max_length or choose over_length truncate or split"
            )

    def __reduce__(self) -> tuple[type[Documents], tuple[Corpus, int, OverLength]]:
        return Documents, (self.corpus, self.max_length, self.over_length)

    @cached_property
    def lengths(self) -> npt.NDArray[np.int32]:
        """(rows,) tokens of each document."""
        if not self._changed:
            return self.corpus.lengths
        lengths = np.empty(self.rows, np.int32)
        for source, pieces, out in self._stretches():
            owner, index = _pieces_in_order(pieces)
            left = self.corpus.lengths[source][owner] - index * self.max_length
            np.minimum(left, self.max_length, out=lengths[out], casting="same_kind")
        return lengths

    @cached_property
    def label_tokens(self) -> npt.NDArray[np.int32]:
        """(rows,) labels of each document after its own shift; reads the labels of cut rows."""
        if not self._changed:
            return self.corpus.label_tokens
        if not self.corpus.has_labels:
            return self.lengths - 1
        label_tokens = np.empty(self.rows, np.int32)
        for source, pieces, out in self._stretches():
            counts = np.repeat(self.corpus.label_tokens[source], pieces)
            first = np.cumsum(pieces) - pieces
            cut = (self.corpus.lengths[source] > self.max_length) & (pieces > 0)
            for row in np.flatnonzero(cut).tolist():
                at, count = int(first[row]), int(pieces[row])
                counts[at : at + count] = self._count_cut_labels(source.start + row, count)
            label_tokens[out] = counts
        return label_tokens

    @cached_property
    def report(self) -> LengthReport:
        """What was dropped, cut and split."""
        policy, over = self.over_length, self._over_rows
        whole = self.corpus.rows - self._zero_rows - over
        kept, labels_kept = (x.sum(dtype=np.int64) for x in (self.lengths, self.label_tokens))
        return LengthReport(
            over_length=policy,
            max_length=self.max_length,
            rows=self.rows,
            zero_length_rows=self._zero_rows,
            dropped_rows=over if policy == "drop" else 0,
            truncated_rows=over if policy == "truncate" else 0,
            split_rows=over if policy == "split" else 0,
            pieces=self.rows - whole if policy == "split" else 0,
            lost_tokens=self.corpus.manifest.tokens - int(kept),
            lost_label_tokens=self.corpus.manifest.label_tokens - int(labels_kept),
        )

    def read(self, row: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32] | None]:
        """Token ids and unshifted labels (None: every token is one) of a document, (length,) each.

        Both are read-only views of the mapped file.

        Raises:
            IndexError: `row` is not in [0, rows).
        """
        row = operator.index(row)
        if not 0 <= row < self.rows:
            raise IndexError(f"row {row} is not in this view: its rows are 0 to {self.rows - 1}")
        source, piece = self._locate(row) if self._changed else (row, 0)
        tokens, labels = self.corpus.tokens(source), self.corpus.labels(source)
        cut = slice(piece * self.max_length, (piece + 1) * self.max_length)
        return tokens[cut], None if labels is None else labels[cut]

    def _locate(self, row: int) -> tuple[int, int]:
        """The corpus row behind a view row, and which piece of it the view row is."""
        block = int(np.searchsorted(self._starts, row, side="right")) - 1
        pieces = self._pieces(slice(block * _BLOCK, (block + 1) * _BLOCK))
        ends = np.cumsum(pieces)
        row -= int(self._starts[block])
        i = int(np.searchsorted(ends, row, side="right"))
        return block * _BLOCK + i, row - int(ends[i] - pieces[i])

    def _pieces(self, source: slice) -> npt.NDArray[np.int64]:
        """How many documents each of these corpus rows becomes."""
        lengths = self.corpus.lengths[source].astype(np.int64)
        match self.over_length:
            case "drop":
                return ((lengths > 0) & (lengths <= self.max_length)).astype(np.int64)
            case "split":
                return -(-lengths // self.max_length)
        return (lengths > 0).astype(np.int64)

    def _index(self) -> npt.NDArray[np.int64]:
        """The first document of every block of corpus rows, and at the end how many there are."""
        blocks = -(-self.corpus.rows // _BLOCK)
        starts = np.minimum(np.arange(blocks + 1) * _BLOCK, self.corpus.rows)
        if self._changed:
            for first in range(0, self.corpus.rows, _AT_A_TIME):
                pieces = self._pieces(slice(first, first + _AT_A_TIME))
                sums = np.add.reduceat(pieces, np.arange(0, len(pieces), _BLOCK))
                starts[first // _BLOCK + 1 :][: len(sums)] = sums
            starts = np.cumsum(starts)
        return starts

    def _stretches(self) -> Iterator[tuple[slice, npt.NDArray[np.int64], slice]]:
        """Corpus rows, how many documents each becomes, and where these are, stretch by stretch.

        A stretch is whole blocks, as many as have up to `_AT_A_TIME` rows and documents.
        """
        block, blocks = 0, len(self._starts) - 1
        while block < blocks:
            reach = int(np.searchsorted(self._starts, self._starts[block] + _AT_A_TIME, "right"))
            stop = min(max(reach - 1, block + 1), block + _AT_A_TIME // _BLOCK, blocks)
            source = slice(block * _BLOCK, min(stop * _BLOCK, self.corpus.rows))
            yield (
                source,
                self._pieces(source),
                slice(int(self._starts[block]), int(self._starts[stop])),
            )
            block = stop

    def _count_cut_labels(self, row: int, pieces: int) -> npt.NDArray[np.int32]:
        end = min(int(self.corpus.lengths[row]), pieces * self.max_length)
        cuts = np.append(np.arange(pieces) * self.max_length, end)
        return count_label_tokens(cuts, self.corpus.labels(row))


def _pieces_in_order(
    pieces: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """For each document: which row it is of, and the how-manieth piece of that row."""
    owner = np.repeat(np.arange(len(pieces)), pieces)
    before = np.cumsum(pieces) - pieces
    return owner, np.arange(len(owner)) - before[owner]
