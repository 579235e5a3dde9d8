"""Reads JSON lines, whole files or the lines that begin in a range of bytes."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa

from flexray.datasets import parts
from flexray.datasets.columns import LABELS, Chosen, Column
from flexray.datasets.errors import CorpusError
from flexray.datasets.parts import Part, Rows
from flexray.datasets.sources import Source

_BUFFER = 1 << 20
_FLAGS = "zeros and ones"


def choose_key(source: Source, column: Column) -> Chosen | None:
    """What the first line says that there is; None where there is no line.

    Raises:
        CorpusError: it is broken, or has nothing to read.
    """
    with source.open() as stored, _buffered(source.decompress(stored)) as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                where = f"{source.name}:{number}"
                return column.choose(list(_parse(line, where)), where)
    return None


def read_lines(part: Part) -> Iterator[Rows]:
    """The rows of a part, in order.

    Raises:
        CorpusError: a line is broken, or not like the first line of the file.
    """
    source, chosen = part.source, part.chosen
    column = Column(**{chosen.kind: chosen.name})
    # Most lines have the same keys, so that most need no choice of their own.
    known: dict[tuple[str, ...], Chosen] = {}
    block = _Block(chosen)
    done = 0
    with source.open() as stored, _buffered(source.decompress(stored)) as lines:
        begin = _skip_to_line(lines, part.start)
        where = _line_names(source, begin)
        at, number = begin, 0
        while source.compression or at < part.stop:
            line = lines.readline()
            if not line:
                break
            at += len(line)
            number += 1
            if not line.strip():
                continue
            if block.is_full(len(line)):
                yield block.rows(where, done)
                block = _Block(chosen)
            # Of a compressed file, what was read of it as it is stored.
            done = stored.tell() if source.compression else min(at, part.stop) - part.start
            try:
                record = _parse(line, "")
                keys = tuple(record)
                if keys not in known:
                    known[keys] = _choose_like(chosen, column, list(record))
            except CorpusError as error:
                raise CorpusError(f"{where(number)}{error}") from None
            block.add(record, number, len(line))
    if block.numbers:
        yield block.rows(where, done)


def _choose_like(chosen: Chosen, column: Column, names: list[str]) -> Chosen:
    has = column.choose(names, "")
    if chosen.kind == "tokens" and has.beside != chosen.beside:
        raise CorpusError(
            f": {f'`{has.beside}`' if has.beside else 'no labels'}, unlike the first line; give "
            "all lines the same, or none"
        )
    return has


class _Block:
    """Records that become one `Rows`."""

    def __init__(self, chosen: Chosen) -> None:
        self._chosen = chosen
        self._values: list[Any] = []
        self._beside: list[Any] = []
        self._size = 0
        self.numbers: list[int] = []

    def is_full(self, more: int) -> bool:
        """Whether a line of `more` bytes has no place here."""
        full = self._size + more > parts.SLICE_BYTES or len(self.numbers) == parts.SLICE_ROWS
        return bool(self.numbers) and full

    def add(self, record: dict[str, Any], number: int, size: int) -> None:
        """Add the record of line `number`."""
        self.numbers.append(number)
        self._values.append(record[self._chosen.name])
        if self._chosen.beside:  # every line has labels, or none has; some may have no tools
            self._beside.append(record.get(self._chosen.beside))
        self._size += size

    def rows(self, line_name: Callable[[int], str], done: int) -> Rows:
        """All records; `line_name` says what a line's number is in the file."""
        numbers, chosen = self.numbers, self._chosen

        def where(row: int) -> str:
            return line_name(numbers[row])

        if chosen.kind == "chat":
            return Rows(self._values, done, where, self._beside if chosen.beside else None)
        return Rows(
            _array(self._values, "token ids" if chosen.kind == "tokens" else None, where),
            done,
            where,
            _array(self._beside, LABELS if chosen.beside == LABELS else _FLAGS, where)
            if chosen.beside
            else None,
        )


def _buffered(stream: pa.NativeFile) -> io.BufferedReader:
    return io.BufferedReader(stream, _BUFFER)


def _skip_to_line(lines: io.BufferedReader, start: int) -> int:
    """Go to the first line that begins at `start` or after, and say where that is."""
    if not start:
        return 0
    lines.seek(start - 1)
    return start - 1 + len(lines.readline())


def _line_names(source: Source, begin: int) -> Callable[[int], str]:
    """Names lines by their number in the file, which is found only when it is asked for."""

    def name(number: int) -> str:
        before, left = 0, begin
        with source.open() as stored:
            while left:
                block = stored.read(min(left, _BUFFER))
                before += block.count(b"\n")
                left -= len(block)
        return f"{source.name}:{before + number}"

    return name


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(decode(line, where))
    except json.JSONDecodeError as error:
        raise CorpusError(f"{where}: broken JSON ({error.msg})") from None
    except RecursionError:
        raise CorpusError(f"{where}: JSON that is nested too deeply") from None
    if not isinstance(record, dict):
        raise CorpusError(f"{where}: not a JSON object; give one object a line")
    return record


def decode(raw: bytes, where: str) -> str:
    """Text of UTF-8 bytes, without a byte order mark."""
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CorpusError(
            f"{where}: not UTF-8 text (byte 0x{raw[error.start]:02x} at offset {error.start}); "
            "convert it or leave it out"
        ) from None


def _array(values: list[Any], lists_of: str | None, where: Callable[[int], str]) -> pa.Array:
    """Texts, or lists of integers (or of flags) that are `lists_of` something."""
    try:
        # Token ids are typed by what they are: told to be integers, Arrow would cut 1.5 to 1.
        array = pa.array(values, None if lists_of else pa.large_string())
        if not lists_of or _may_be(array.type, lists_of):
            return array
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        pass
    if len(values) > 1:  # one by one, to find the bad line
        for row, value in enumerate(values):
            _array([value], lists_of, lambda _, row=row: where(row))  # type: ignore[misc]
    what = f"a list of {lists_of}" if lists_of else "text in valid Unicode"
    raise CorpusError(f"{where(0)}: {json.dumps(values[0])[:60]} is not {what}")


def _may_be(kind: pa.DataType, lists_of: str) -> bool:
    if pa.types.is_list(kind):
        kind = kind.value_type
        if pa.types.is_boolean(kind) and lists_of == _FLAGS:
            return True
        return bool(pa.types.is_integer(kind) or pa.types.is_null(kind))
    return bool(pa.types.is_null(kind))
