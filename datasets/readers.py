"""Reads text, or token ids and labels, from files of every kind, some rows at a time."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from flexray.datasets.errors import CorpusError
from flexray.datasets.sources import Source

SLICE_ROWS = 4096
SLICE_BYTES = 1 << 22
LABELS = "labels"
# Other ways to say what is trained on. Passed over, masked tokens would be trained on.
_MASKS = ("loss_mask", "completion_mask", "assistant_masks")


@dataclass(frozen=True)
class Column:
    """Which column to read: `text`, `tokens`, or where both are None, "text" or "input_ids"."""

    text: str | None = None
    tokens: str | None = None

    def choose(self, names: list[str], where: str) -> Chosen:
        """What to read of columns `names`.

        Raises:
            CorpusError: there is no such column, or something says which tokens are trained on in
                a way that is not read.
        """
        asked = self.tokens or self.text
        candidates = [asked] if asked else ["text", "input_ids"]
        for name in candidates:
            if name in names:
                are_tokens = self.tokens is not None or (asked is None and name == "input_ids")
                break
        else:
            raise CorpusError(
                f"{where}: no column {' or '.join(map(repr, candidates))}; "
                f"it has {', '.join(names) or 'none'}: name the text column or the tokens column"
            )
        marks = [mark for mark in (LABELS, *_MASKS) if mark in names and mark != name]
        if asked is None and not are_tokens and marks and "input_ids" in names:
            raise CorpusError(
                f"{where}: has text, and token ids with {marks[0]}: name the text column or the "
                "tokens column"
            )
        if are_tokens and marks and (mask := marks[-1]) in _MASKS:
            raise CorpusError(
                f"{where}: column `{mask}` is not supported yet: give labels with -100"
            )
        return Chosen(name, are_tokens, LABELS if are_tokens and marks else None)


@dataclass(frozen=True)
class Chosen:
    """The column to read, whether it holds token ids, and the column of their labels."""

    name: str
    are_tokens: bool
    labels: str | None

    @property
    def names(self) -> list[str]:
        """All columns to read."""
        return [self.name, self.labels] if self.labels else [self.name]


@dataclass(frozen=True)
class Rows:
    """Some consecutive rows of a source.

    Attributes:
        values: the column's values as they are stored.
        are_tokens: whether they are token ids; text otherwise.
        position: bytes of the stored file read so far.
        where: says where a row of `values` came from, for errors.
        labels: of token ids, as they are stored; None if all tokens count.
    """

    values: pa.Array
    are_tokens: bool
    position: int
    where: Callable[[int], str]
    labels: pa.Array | None = None


def read_rows(source: Source, column: Column) -> Iterator[Rows]:
    """All rows of `source`, in order, in memory bounded by its largest row or record batch.

    Raises:
        CorpusError: the file is broken, or has no such column.
    """
    read = {"text": _text, "jsonl": _jsonl, "parquet": _parquet, "arrow": _arrow}[source.kind]
    try:
        yield from read(source, column)
    except (pa.ArrowException, OSError) as error:
        reason = str(error).strip().split("\n")[0]
        raise CorpusError(f"{source.path}: cannot be read as {source.kind} ({reason})") from None


def _text(source: Source, column: Column) -> Iterator[Rows]:
    if name := column.text or column.tokens:
        raise CorpusError(f"{source.path}: is plain text, so it has no column {name!r}")
    with source.open() as stored:
        text = _decode(source.decompress(stored).read(), str(source.path))
    yield Rows(pa.array([text], pa.large_string()), False, source.size, lambda _: str(source.path))


def _jsonl(source: Source, column: Column) -> Iterator[Rows]:
    with source.open() as stored, io.BufferedReader(source.decompress(stored), 1 << 20) as lines:
        numbers: list[int] = []
        values: list[Any] = []
        labels: list[Any] = []
        size = 0
        chosen: Chosen | None = None

        def rows(chosen: Chosen) -> Rows:
            at = tuple(numbers)
            return Rows(
                _json_values(source, values, at, "token ids" if chosen.are_tokens else None),
                chosen.are_tokens,
                stored.tell(),
                lambda row: f"{source.path}:{at[row]}",
                _json_values(source, labels, at, "labels") if chosen.labels else None,
            )

        for number, line in enumerate(lines, start=1):
            where = f"{source.path}:{number}"
            if not line.strip():
                continue
            try:
                record = json.loads(_decode(line, where))
            except json.JSONDecodeError as error:
                raise CorpusError(f"{where}: broken JSON ({error.msg})") from None
            if not isinstance(record, dict):
                raise CorpusError(f"{where}: not a JSON object; give one object a line")
            line_has = column.choose(list(record), where)
            if chosen is None:  # the first line chooses for the whole file
                chosen = line_has
                column = Column(tokens=chosen.name) if chosen.are_tokens else Column(chosen.name)
            elif line_has != chosen:
                has = "labels" if line_has.labels else "no labels"
                raise CorpusError(
                    f"{where}: {has}, unlike the lines before; give all lines labels, or none"
                )
            if values and (size + len(line) > SLICE_BYTES or len(values) == SLICE_ROWS):
                yield rows(chosen)
                numbers, values, labels, size = [], [], [], 0
            numbers.append(number)
            values.append(record[chosen.name])
            if chosen.labels:
                labels.append(record[chosen.labels])
            size += len(line)
        if chosen:
            yield rows(chosen)


def _json_values(
    source: Source, values: list[Any], numbers: tuple[int, ...], lists_of: str | None
) -> pa.Array:
    """Texts, or lists of integers that are `lists_of` something."""
    try:
        # Token ids are typed by what they are: told to be integers, Arrow would cut 1.5 to 1.
        array = pa.array(values, None if lists_of else pa.large_string())
        if not lists_of or _may_be_ids(array.type):
            return array
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        pass
    if len(values) > 1:  # one by one, to find the bad line
        for value, number in zip(values, numbers, strict=True):
            _json_values(source, [value], (number,), lists_of)
    what = f"a list of {lists_of}" if lists_of else "text in valid Unicode"
    raise CorpusError(f"{source.path}:{numbers[0]}: {json.dumps(values[0])[:60]} is not {what}")


def _may_be_ids(kind: pa.DataType) -> bool:
    if pa.types.is_list(kind):
        kind = kind.value_type
        return bool(pa.types.is_integer(kind) or pa.types.is_null(kind))
    return bool(pa.types.is_null(kind))


def _decode(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CorpusError(
            f"{where}: not UTF-8 text (byte 0x{raw[error.start]:02x} at offset {error.start}); "
            "convert it or leave it out"
        ) from None


def _parquet(source: Source, column: Column) -> Iterator[Rows]:
    with source.open() as stored, pq.ParquetFile(stored, pre_buffer=False) as file:
        chosen = column.choose(file.schema_arrow.names, str(source.path))
        first, total = 0, file.metadata.num_rows
        step = _slice_rows(total, _parquet_bytes(file.metadata, chosen.names))
        for batch in file.iter_batches(batch_size=step, columns=chosen.names):
            position = source.size * (first + batch.num_rows) // total
            yield from _slices(source, batch, chosen, first, position)
            first += batch.num_rows


def _parquet_bytes(metadata: pq.FileMetaData, names: list[str]) -> int:
    """Uncompressed size of top-level columns."""
    groups = (metadata.row_group(i) for i in range(metadata.num_row_groups))
    chunks = (group.column(j) for group in groups for j in range(metadata.num_columns))
    return sum(
        chunk.total_uncompressed_size
        for chunk in chunks
        if chunk.path_in_schema.split(".")[0] in names
    )


def _arrow(source: Source, column: Column) -> Iterator[Rows]:
    with source.open() as stored:
        is_file = stored.read(6) == b"ARROW1"
        stored.seek(0)
        if is_file:
            reader = pa.ipc.open_file(stored)
            batches = map(reader.get_batch, range(reader.num_record_batches))
        else:
            reader = batches = pa.ipc.open_stream(source.decompress(stored))
        chosen = column.choose(reader.schema.names, str(source.path))
        first = 0
        for i, batch in enumerate(batches, start=1):
            position = source.size * i // reader.num_record_batches if is_file else stored.tell()
            yield from _slices(source, batch, chosen, first, position)
            first += batch.num_rows


def _slice_rows(rows: int, size: int) -> int:
    return max(1, min(SLICE_ROWS, rows * SLICE_BYTES // max(size, 1)))


def _slices(
    source: Source, batch: pa.RecordBatch, chosen: Chosen, first: int, position: int
) -> Iterator[Rows]:
    """Cut a stored record batch, which may be a whole file, into pieces of bounded size."""
    # Other columns stay unread: uncompressed files are only mapped.
    columns = [batch.column(batch.schema.names.index(name)) for name in chosen.names]
    step = _slice_rows(batch.num_rows, sum(column.nbytes for column in columns))
    for start in range(0, batch.num_rows, step):
        at = first + start
        values, *labels = (column.slice(start, step) for column in columns)
        yield Rows(
            values,
            chosen.are_tokens,
            position,
            lambda row, at=at: f"{source.path}: row {at + row}",  # type: ignore[misc]
            *labels,
        )
