"""What readers are given and what they give: a part of a file, and rows of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flexray.datasets.columns import Chosen
from flexray.datasets.sources import Source

SLICE_ROWS = 4096  # most rows and bytes that readers give at once
SLICE_BYTES = 1 << 22


@dataclass(frozen=True)
class Part:
    """Units `start` to `stop` of a source, and what to read of them.

    Units are bytes of JSON lines (those lines that begin in them), row groups of Parquet and record
    batches of Arrow; a compressed or plain text file is one unit. `size` is in bytes of the file.
    """

    source: Source
    chosen: Chosen
    start: int
    stop: int
    size: int


@dataclass(frozen=True)
class Rows:
    """Some consecutive rows of a source.

    Attributes:
        values: text or token ids as Arrow has them, without dictionary encoding and extension
            types; chats as Python lists of messages. None is a null row.
        beside: of the column beside it, as many; None if there is none.
        done: bytes of the part read so far.
        where: says where a row came from, for errors.
    """

    values: Any
    done: int
    where: Callable[[int], str]
    beside: Any = None
