"""Append-only files of one JSON object a line, whole lines only."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from flexray.errors import UserError


class JsonLinesWriter:
    """Appends objects; each is on disk (handed to the system) when `append` returns.

    A line that a crash left half-written at the end is cut off on opening.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._file.truncate(_whole_lines(path.read_bytes()))

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line. Strict JSON: what is not finite becomes null; arrays become lists."""
        line = json.dumps(_plain(record), allow_nan=False, separators=(", ", ": "))
        self._file.write(line.encode() + b"\n")

    def close(self) -> None:
        """Close the file; more than once does no harm."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file, one that is being written included (a torn end is no line yet).

    Raises:
        UserError: The file cannot be read, or a whole line is not a JSON object.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot read this file: {error.strerror}") from None
    for number, line in enumerate(data[: _whole_lines(data)].splitlines(), 1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise UserError(f"{path}: line {number} is not a JSON object")
        yield record


def _whole_lines(data: bytes) -> int:
    """Bytes up to and including the last line end."""
    return data.rfind(b"\n") + 1


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, int | str):  # most of all values
        return value
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
