"""Turns column values, however Arrow encodes them, into texts or checked token ids and labels."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from flexray.datasets.columns import LABELS
from flexray.datasets.errors import CorpusError
from flexray.datasets.manifest import TokenizerInfo
from flexray.datasets.parts import Rows
from flexray.datasets.readers import plain
from flexray.datasets.writer import IGNORED_LABEL

_T = pa.types

Ints = npt.NDArray[np.integer]


def texts_of(rows: Rows) -> list[str]:
    """The texts of all rows that are not null.

    Raises:
        CorpusError: the column holds no text, or a row is not UTF-8.
    """
    values = rows.values
    if values.null_count == len(values):
        return []
    if not _is_text(values.type):
        raise CorpusError(f"{rows.where(0)}: the column holds {values.type}, not text")
    try:
        return [text for text in values.to_pylist() if text is not None]
    except UnicodeDecodeError:
        row = next(i for i in range(len(values)) if not _decodes(values[i]))
        raise CorpusError(f"{rows.where(row)}: not UTF-8 text; convert it first") from None


def ids_of(
    rows: Rows, beside: str | None, tokenizer: TokenizerInfo, vocab_size: int
) -> tuple[Ints, Ints, Ints | None]:
    """Tokens of each row that is not null, (n,), their ids, one row after the other, and labels.

    Labels are of the ids' shape, -100 where ignored, or None where the rows have none.

    Args:
        rows: token ids, and labels or a mask beside them.
        beside: name of the column beside the ids.
        tokenizer: for errors.
        vocab_size: ids and labels must be below it.

    Raises:
        CorpusError: a column holds no lists of integers, an id or a label is null or not in the
            vocabulary, a mask holds something else than 0 and 1, or a row has not as many as ids.
    """
    valid = rows.values.is_valid()
    present = np.flatnonzero(valid.to_numpy(zero_copy_only=False))
    none = np.empty(0, np.int32)
    if not len(present):
        return none, none, none if beside else None

    def where(row: int) -> str:
        return rows.where(int(present[row]))

    def refuse_outside(bad: npt.NDArray[np.bool_], of: _Items, hint: str) -> None:
        if bad.any():
            item = int(bad.argmax())
            raise CorpusError(
                f"{of.where(item)}: {of.what} {of.items[item]} is outside the vocabulary of "
                f"{vocab_size} of tokenizer {tokenizer.name}; {hint}"
            )

    ids = _Items(rows.values.drop_null(), where, "token id")
    bad = (ids.items < 0) | (ids.items >= vocab_size)
    refuse_outside(bad, ids, "name the tokenizer that made the ids")
    lengths, input_ids = ids.lengths.astype(np.int32), ids.items.astype(np.int32)
    if beside is None:
        return lengths, input_ids, None

    stored = rows.beside.filter(valid)
    is_mask = beside != LABELS
    unlearned = 0 if is_mask else IGNORED_LABEL
    if stored.null_count:
        row = int(np.flatnonzero(stored.is_null().to_numpy(zero_copy_only=False))[0])
        raise CorpusError(f"{where(row)}: token ids without {beside}; give one for each")
    marks = _Items(stored, where, f"{beside} value" if is_mask else "label")
    if (marks.lengths != lengths).any():
        row = int((marks.lengths != lengths).argmax())
        raise CorpusError(
            f"{where(row)}: {marks.lengths[row]} {marks.what}s for {lengths[row]} token ids; give "
            f"one for each, {unlearned} where nothing is to be learned"
        )
    if is_mask:
        bad = (marks.items != 0) & (marks.items != 1)
        if bad.any():
            item = int(bad.argmax())
            raise CorpusError(
                f"{marks.where(item)}: {beside} holds {marks.items[item]}; give 1 for tokens to "
                "be learned, 0 for others"
            )
        return lengths, input_ids, np.where(marks.items == 1, input_ids, np.int32(IGNORED_LABEL))
    bad = ((marks.items < 0) & (marks.items != IGNORED_LABEL)) | (marks.items >= vocab_size)
    refuse_outside(bad, marks, f"give {IGNORED_LABEL} where nothing is to be learned")
    return lengths, input_ids, marks.items.astype(np.int32)


class _Items:
    """What lists of integers (or of flags) hold.

    Attributes:
        lengths: (n,) int64, of each list.
        items: (sum of lengths,) integers, one list after the other.
        what: what an item is, for errors.
    """

    def __init__(self, values: pa.Array, row_name: Callable[[int], str], what: str) -> None:
        self.what, self._row_name = what, row_name
        kind = values.type
        if not _is_list(kind):
            raise CorpusError(f"{row_name(0)}: the column holds {kind}, not {what}s")
        values.validate(full=True)  # offsets of a broken file may point anywhere
        self.lengths = pc.list_value_length(values).to_numpy(zero_copy_only=False).astype(np.int64)
        items = plain(values.flatten())
        if _T.is_boolean(items.type) and what.endswith("value"):
            items = items.cast(pa.int8())
        if not _T.is_integer(items.type) and items.null_count < len(items):
            raise CorpusError(f"{row_name(0)}: the column holds {kind}, not {what}s")
        if items.null_count:
            item = np.flatnonzero(items.is_null().to_numpy(zero_copy_only=False))[0]
            raise CorpusError(f"{self.where(int(item))}: a {what} is null")
        self.items: Ints = items.to_numpy(zero_copy_only=False)

    def where(self, item: int) -> str:
        """The row that an item is in."""
        return self._row_name(int(np.searchsorted(np.cumsum(self.lengths), item, side="right")))


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
