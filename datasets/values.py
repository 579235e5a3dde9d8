"""Turns column values, however Arrow encodes them, into texts or checked token ids and labels."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from flexray.datasets.errors import CorpusError
from flexray.datasets.manifest import TokenizerInfo
from flexray.datasets.readers import Rows
from flexray.datasets.writer import IGNORED_LABEL

_T = pa.types

Ints = npt.NDArray[np.integer]


def texts_of(rows: Rows) -> list[str]:
    """The texts of all rows that are not null.

    Raises:
        CorpusError: the column holds no text, or a row is not UTF-8.
    """
    values = _plain(rows.values)
    if values.null_count == len(values):
        return []
    if not _is_text(values.type):
        raise CorpusError(f"{rows.where(0)}: the column holds {rows.values.type}, not text")
    try:
        return [text for text in values.to_pylist() if text is not None]
    except UnicodeDecodeError:
        row = next(i for i in range(len(values)) if not _decodes(values[i]))
        raise CorpusError(f"{rows.where(row)}: not UTF-8 text; convert it first") from None


def ids_of(rows: Rows, tokenizer: TokenizerInfo, vocab_size: int) -> tuple[Ints, Ints, Ints | None]:
    """Tokens of each row that is not null, (n,), their ids, one row after the other, and labels.

    Labels are of the ids' shape, -100 where ignored, or None where the rows have none.

    Raises:
        CorpusError: a column holds no lists of integers, an id or a label is null or not in the
            vocabulary, or a row has not as many labels as ids.
    """
    values = _plain(rows.values)
    present = np.flatnonzero(values.is_valid().to_numpy(zero_copy_only=False))
    none = np.empty(0, np.int32)
    if not len(present):
        return none, none, None if rows.labels is None else none

    def row(i: int) -> str:
        return rows.where(int(present[i]))

    def outside(what: str, value: int) -> str:
        return (
            f"{what} {value} is outside the vocabulary of {vocab_size} of tokenizer "
            f"{tokenizer.name}; "
        )

    lengths, ids = _integers(values.drop_null(), row, "token id")
    ends = np.cumsum(lengths)

    def where(item: np.intp) -> str:
        return row(int(np.searchsorted(ends, item, side="right")))

    bad = (ids < 0) | (ids >= vocab_size)
    if bad.any():
        item = bad.argmax()
        raise CorpusError(
            f"{where(item)}: {outside('token id', ids[item])}name the tokenizer that made the ids"
        )
    if rows.labels is None:
        return lengths.astype(np.int32), ids.astype(np.int32), None

    stored = _plain(rows.labels).filter(values.is_valid())
    if stored.null_count:
        missing = int(np.flatnonzero(stored.is_null().to_numpy(zero_copy_only=False))[0])
        raise CorpusError(f"{row(missing)}: token ids without labels; give a label for each")
    counts, labels = _integers(stored, row, "label")
    if (counts != lengths).any():
        i = int((counts != lengths).argmax())
        raise CorpusError(
            f"{row(i)}: {counts[i]} labels for {lengths[i]} token ids; give a label for each, "
            f"{IGNORED_LABEL} where nothing is to be learned"
        )
    bad = ((labels < 0) & (labels != IGNORED_LABEL)) | (labels >= vocab_size)
    if bad.any():
        item = bad.argmax()
        raise CorpusError(
            f"{where(item)}: {outside('label', labels[item])}"
            f"give {IGNORED_LABEL} where nothing is to be learned"
        )
    return lengths.astype(np.int32), ids.astype(np.int32), labels.astype(np.int32)


def _integers(values: pa.Array, row: Callable[[int], str], what: str) -> tuple[Ints, Ints]:
    """Items of each list, (n,), and the items one list after the other; `row` names a list."""
    if not _is_list(values.type):
        raise CorpusError(f"{row(0)}: the column holds {values.type}, not {what}s")
    lengths = pc.list_value_length(values).to_numpy(zero_copy_only=False).astype(np.int64)
    items = _plain(values.flatten())
    if not _T.is_integer(items.type) and items.null_count < len(items):
        raise CorpusError(f"{row(0)}: the column holds {values.type}, not {what}s")
    if items.null_count:
        item = np.flatnonzero(items.is_null().to_numpy(zero_copy_only=False))[0]
        at = int(np.searchsorted(np.cumsum(lengths), item, side="right"))
        raise CorpusError(f"{row(at)}: a {what} is null")
    return lengths, items.to_numpy(zero_copy_only=False)


def _plain(values: pa.Array) -> pa.Array:
    """Without dictionary encoding and extension types."""
    if isinstance(values, pa.ExtensionArray):
        values = values.storage
    if _T.is_dictionary(values.type):
        values = values.dictionary.take(values.indices)
    return values


def _is_list(kind: pa.DataType) -> bool:
    return bool(
        _T.is_list(kind)
        or _T.is_large_list(kind)
        or _T.is_fixed_size_list(kind)
        or _T.is_list_view(kind)
        or _T.is_large_list_view(kind)
    )


def _is_text(kind: pa.DataType) -> bool:
    return bool(_T.is_string(kind) or _T.is_large_string(kind) or _T.is_string_view(kind))


def _decodes(value: pa.Scalar) -> bool:
    try:
        value.as_py()
    except UnicodeDecodeError:
        return False
    return True
