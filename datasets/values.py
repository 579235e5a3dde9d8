"""Turns stored column values, however Arrow encodes them, into texts or checked token ids."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from flexray.datasets.errors import CorpusError
from flexray.datasets.manifest import TokenizerInfo
from flexray.datasets.readers import Rows

_T = pa.types


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


def ids_of(
    rows: Rows, tokenizer: TokenizerInfo, vocab_size: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Tokens of each row that is not null, (n,), and their ids, one row after the other.

    Raises:
        CorpusError: the column holds no lists of integers, or an id is null or not in the
            vocabulary.
    """
    values = _plain(rows.values)
    present = np.flatnonzero(values.is_valid().to_numpy(zero_copy_only=False))
    if not len(present):
        return np.empty(0, np.int32), np.empty(0, np.int32)
    if not _is_list(values.type):
        raise CorpusError(f"{rows.where(0)}: the column holds {rows.values.type}, not token ids")
    values = values.drop_null()
    lengths = pc.list_value_length(values).to_numpy(zero_copy_only=False).astype(np.int64)
    ends = np.cumsum(lengths)
    items = _plain(values.flatten())
    if not _T.is_integer(items.type) and items.null_count < len(items):
        raise CorpusError(f"{rows.where(0)}: the column holds {rows.values.type}, not token ids")

    def where(item: int) -> str:
        return rows.where(int(present[np.searchsorted(ends, item, side="right")]))

    if items.null_count:
        item = int(np.flatnonzero(items.is_null().to_numpy(zero_copy_only=False))[0])
        raise CorpusError(f"{where(item)}: a token id is null")
    ids = items.to_numpy(zero_copy_only=False)
    outside = (ids < 0) | (ids >= vocab_size)
    if outside.any():
        item = int(outside.argmax())
        raise CorpusError(
            f"{where(item)}: token id {ids[item]} is outside the vocabulary of {vocab_size} of "
            f"tokenizer {tokenizer.name}; name the tokenizer that made the ids"
        )
    return lengths.astype(np.int32), ids.astype(np.int32)


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
