"""Cuts files of every kind into parts, and reads a part, some rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from flexray.datasets import parts
from flexray.datasets.columns import Chosen, Column
from flexray.datasets.errors import CorpusError
from flexray.datasets.json_lines import choose_key, decode, read_lines
from flexray.datasets.parts import Part, Rows
from flexray.datasets.sources import Source


def cut(source: Source, column: Column, most: int) -> list[Part]:
    """The parts of a source, in order, none of more than `most` bytes where it can be cut so.

    Raises:
        CorpusError: the file is broken, or has no such column.
    """
    with _one_line(source):
        if source.kind == "parquet":
            return _cut_parquet(source, column)
        if source.kind == "arrow":
            return _cut_arrow(source, column)
        if source.kind == "text":
            if column.named:
                raise CorpusError(
                    f"{source.name}: is plain text, so it has no column {column.named!r}"
                )
            return [Part(source, Chosen("text", "text"), 0, 1, source.size)]
        chosen = choose_key(source, column)
        if chosen is None:
            return []
        if source.compression:
            return [Part(source, chosen, 0, 1, source.size)]
        count = -(-source.size // most)
        ends = [source.size * i // count for i in range(count + 1)]
        return [Part(source, chosen, a, b, b - a) for a, b in pairwise(ends)]


def read_rows(part: Part) -> Iterator[Rows]:
    """All rows of `part`, in order, in memory bounded by its largest row or record batch.

    Raises:
        CorpusError: the file is broken.
    """
    read = {"text": _text, "jsonl": read_lines, "parquet": _parquet, "arrow": _arrow}
    with _one_line(part.source):
        yield from read[part.source.kind](part)


@contextmanager
def _one_line(source: Source) -> Iterator[None]:
    try:
        yield
    except CorpusError:
        raise
    except Exception as error:
        if not (source.url or isinstance(error, pa.ArrowException | OSError)):
            raise  # far file systems have errors of their own
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise CorpusError(f"{source.name}: cannot be read as {source.kind} ({reason})") from None


def _text(part: Part) -> Iterator[Rows]:
    source = part.source
    with source.open() as stored:
        text = decode(source.decompress(stored).read(), source.name)
    yield Rows(pa.array([text], pa.large_string()), part.size, lambda _: source.name)


def _cut_parquet(source: Source, column: Column) -> list[Part]:
    with source.open() as stored, pq.ParquetFile(stored, pre_buffer=False) as file:
        chosen = column.choose(file.schema_arrow.names, source.name)
        groups = file.metadata.num_row_groups
        rows = [file.metadata.row_group(i).num_rows for i in range(groups)]
    return _shares(source, chosen, rows)


def _shares(source: Source, chosen: Chosen, rows: list[int]) -> list[Part]:
    """A part for each unit; the file's bytes are shared out by their rows."""
    done, shared, total = 0, 0, max(sum(rows), 1)
    found = []
    for i, more in enumerate(rows):
        done += more
        size = source.size * done // total - shared
        found.append(Part(source, chosen, i, i + 1, size))
        shared += size
    return found


def _parquet(part: Part) -> Iterator[Rows]:
    chosen = part.chosen
    with (
        part.source.open() as stored,
        pq.ParquetFile(
            stored, pre_buffer=bool(part.source.url), page_checksum_verification=True
        ) as file,
    ):
        groups = [file.metadata.row_group(i) for i in range(part.stop)]
        first = sum(group.num_rows for group in groups[: part.start])
        wanted = groups[part.start :]
        total = sum(group.num_rows for group in wanted)
        step = _slice_rows(total, sum(_column_bytes(group, chosen.names) for group in wanted))
        done = 0
        for batch in file.iter_batches(
            batch_size=step, row_groups=range(part.start, part.stop), columns=chosen.names
        ):
            end = part.size * (done + batch.num_rows) // total
            yield from _slices(part, batch, partial(int, first + done), end)
            done += batch.num_rows


def _column_bytes(group: pq.RowGroupMetaData, names: list[str]) -> int:
    """Uncompressed size of top-level columns."""
    chunks = (group.column(i) for i in range(group.num_columns))
    return sum(c.total_uncompressed_size for c in chunks if c.path_in_schema.split(".")[0] in names)


def _cut_arrow(source: Source, column: Column) -> list[Part]:
    with source.open() as stored:
        if reader := _file_reader(stored):
            chosen = column.choose(reader.schema.names, source.name)
            return _shares(source, chosen, [1] * reader.num_record_batches)
        chosen = column.choose(
            pa.ipc.open_stream(source.decompress(stored)).schema.names, source.name
        )
        if _is_uncut_stream(source):
            return [Part(source, chosen, 0, 1, source.size)]
        stored.seek(0)
        messages = pa.ipc.MessageReader.open_stream(stored)
        batches = sum(message.type == "record batch" for message in messages)
        return _shares(source, chosen, [1] * batches)


def _file_reader(stored: pa.NativeFile) -> pa.ipc.RecordBatchFileReader | None:
    """None for a stream."""
    is_file = stored.read(6) == b"ARROW1"
    stored.seek(0)
    return pa.ipc.open_file(stored) if is_file else None


def _arrow(part: Part) -> Iterator[Rows]:
    source = part.source
    with source.open() as stored:
        if reader := _file_reader(stored):
            count = part.stop - part.start

            def before() -> int:
                return sum(reader.get_batch(i).num_rows for i in range(part.start))

            for i in range(count):
                done = part.size * (i + 1) // count
                batch = reader.get_batch(part.start + i)
                yield from _slices(part, batch, before, done)
        else:
            yield from _arrow_stream(part, stored)


def _arrow_stream(part: Part, stored: pa.NativeFile) -> Iterator[Rows]:
    whole = _is_uncut_stream(part.source)
    first = 0
    for i, batch in enumerate(pa.ipc.open_stream(part.source.decompress(stored))):
        if not whole and i == part.stop:
            break
        if i >= part.start:
            share = part.size * (i + 1 - part.start) // (part.stop - part.start)
            done = min(stored.tell(), part.size) if whole else share
            yield from _slices(part, batch, partial(int, first), done)
        first += batch.num_rows


def _is_uncut_stream(source: Source) -> bool:
    # A stream says nowhere where its batches are: to walk through it is cheap only when mapped.
    return bool(source.compression or source.url)


def _slice_rows(rows: int, size: int) -> int:
    return max(1, min(parts.SLICE_ROWS, rows * parts.SLICE_BYTES // max(size, 1)))


def _slices(
    part: Part, batch: pa.RecordBatch, first: Callable[[], int], done: int
) -> Iterator[Rows]:
    """Cut a stored record batch, which may be a whole file, into slices of bounded size.

    `first` is the number of its first row in the file, which only errors ask for.
    """
    # Other columns stay unread: uncompressed files are only mapped.
    columns = [batch.column(batch.schema.names.index(name)) for name in part.chosen.names]
    step = _slice_rows(batch.num_rows, sum(column.nbytes for column in columns))
    for start in range(0, batch.num_rows, step):
        values, *beside = (column.slice(start, step) for column in columns)

        def where(row: int, at: int = start) -> str:
            return f"{part.source.name}: row {first() + at + row}"

        read = partial(_messages, where=where) if part.chosen.kind == "chat" else plain
        yield Rows(read(values), done, where, *map(read, beside))


def plain(values: pa.Array) -> pa.Array:
    """Without dictionary encoding and extension types."""
    if isinstance(values, pa.ExtensionArray):
        values = values.storage
    if pa.types.is_dictionary(values.type):
        values = values.dictionary.take(values.indices)
    return values


def _messages(values: pa.Array, where: Callable[[int], str]) -> list[Any]:
    """Python values; what Arrow filled in for keys that other messages have is left out."""
    found: list[Any] = []
    try:
        for value in values:
            found.append(_without_nulls(value.as_py(maps_as_pydicts="strict")))
    except UnicodeDecodeError:
        raise CorpusError(f"{where(len(found))}: not UTF-8 text; convert it first") from None
    return found


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
