"""A corpus in a few numbers: how long its sequences are, and what its manifest says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flexray.datasets.corpus import Corpus

PERCENTILES = (0, 1, 5, 25, 50, 75, 90, 95, 99, 99.9, 100)
_AT_A_TIME = 1 << 20  # rows


@dataclass(frozen=True)
class Bucket:
    """The sequences of `low` to `high` tokens, both included."""

    low: int
    high: int
    rows: int
    tokens: int


@dataclass(frozen=True)
class LongRow:
    """A row by its id in the corpus."""

    row: int
    length: int
    label_tokens: int


@dataclass(frozen=True)
class Summary:
    """See `summarise`.

    Attributes:
        percentiles: (percent, length): so many of the rows have no more tokens than that.
        histogram: a bucket for each power of two between the shortest and the longest row.
        longest: the longest rows, the longest first.
        zero_length_rows: rows without a token; whatever trains on the corpus leaves them out.
    """

    percentiles: tuple[tuple[float, int], ...]
    mean: float
    histogram: tuple[Bucket, ...]
    longest: tuple[LongRow, ...]
    zero_length_rows: int


def summarise(corpus: Corpus, longest: int = 5) -> Summary:
    """Percentiles, histogram and the `longest` rows; needs about 4 bytes a row for a moment."""
    lengths = corpus.lengths
    rows, tokens = _by_power_of_two(lengths)
    used = np.flatnonzero(rows)
    # `nearest` gives lengths that occur.
    found = np.percentile(lengths, PERCENTILES, method="nearest").tolist()
    return Summary(
        percentiles=tuple(zip(PERCENTILES, map(int, found), strict=True)),
        mean=corpus.manifest.tokens / corpus.rows,
        histogram=tuple(
            Bucket(2**k, 2 ** (k + 1) - 1, int(rows[k]), int(tokens[k]))
            for k in range(used[0], used[-1] + 1)
        ),
        longest=tuple(
            LongRow(row, int(lengths[row]), int(corpus.label_tokens[row]))
            for row in _longest(lengths, longest)
        ),
        zero_length_rows=int(np.count_nonzero(lengths == 0)),
    )


def describe(corpus: Corpus, summary: Summary) -> dict[str, Any]:
    """All of it with what the manifest says, as plain data for JSON."""
    manifest = corpus.manifest.model_dump(exclude={"length_histogram"}, exclude_none=True)
    return {
        "corpus": str(corpus.path),
        **manifest,
        "has_labels": corpus.has_labels,
        "zero_length_rows": summary.zero_length_rows,
        "mean": summary.mean,
        "percentiles": {f"{percent:g}": length for percent, length in summary.percentiles},
        "histogram": [vars(bucket) for bucket in summary.histogram],
        "longest": [vars(row) for row in summary.longest],
        "fingerprint": corpus.manifest.fingerprint,
    }


def _by_power_of_two(
    lengths: npt.NDArray[np.int32],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Rows and tokens with lengths in [2^k, 2^(k+1)), for k from 0 to 31."""
    rows, tokens = np.zeros(32, np.int64), np.zeros(32, np.int64)
    for start in range(0, len(lengths), _AT_A_TIME):
        some = lengths[start : start + _AT_A_TIME]
        some = some[some > 0]
        bucket = np.frexp(some)[1] - 1
        rows += np.bincount(bucket, minlength=32)
        tokens += np.bincount(bucket, some, minlength=32).astype(np.int64)
    return rows, tokens


def _longest(lengths: npt.NDArray[np.int32], count: int) -> list[int]:
    """Row ids, longest first; of equal ones the first."""
    count = min(count, len(lengths))
    if not count:
        return []
    limit = np.partition(lengths, -count)[-count]
    longer = np.flatnonzero(lengths > limit)
    equal = np.flatnonzero(lengths == limit)[: count - len(longer)]
    rows = np.concatenate([longer, equal])
    return [int(row) for row in rows[np.lexsort((rows, -lengths[rows].astype(np.int64)))]]
