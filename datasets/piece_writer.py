"""Writes one piece of a corpus, and knows which pieces an earlier try has finished.

A finished piece has a record beside its files, `NAME.KEY.json`: what was written, under a name that
only the same work on unchanged input has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from flexray.datasets.chat import ChatTokenizer
from flexray.datasets.errors import CorpusError
from flexray.datasets.manifest import TokenizerInfo
from flexray.datasets.messages import ASSISTANT, check_messages, check_tools
from flexray.datasets.parts import Rows
from flexray.datasets.pieces import Piece
from flexray.datasets.readers import read_rows
from flexray.datasets.staging import LOCK_NAME
from flexray.datasets.tokenizer import Tokenizer
from flexray.datasets.values import ids_of, texts_of
from flexray.datasets.writer import SequenceWriter, Written

ENCODE_CHARACTERS = 1 << 22  # texts are tokenised together, so that small files use all cores
ENCODE_TEXTS = 4096

Advance = Callable[[int, int, int], None]  # called with more bytes read, rows and tokens


@dataclass(frozen=True)
class Job:
    """What all pieces are written with; `chat` where there are chats."""

    folder: Path
    tokenizer: Tokenizer
    chat: ChatTokenizer | None = None

    @cached_property
    def info(self) -> TokenizerInfo:
        """What tokenises, its chat template included where there are chats."""
        return (self.chat or self.tokenizer).info

    def record(self, piece: Piece) -> Path:
        """Where what was written of a piece is kept."""
        return self.folder / f"{piece.name}.{piece.key(self.info)}.json"


def write_piece(job: Job, piece: Piece, advance: Advance) -> Written:
    """Write the files of a piece, then its record.

    Raises:
        CorpusError: the input cannot be used.
        OSError: the folder cannot be written.
    """
    writer = SequenceWriter(job.folder, piece.name)
    texts = _TextBuffer(job.tokenizer, writer)
    seen = (0, 0)

    def tell(more: int) -> None:
        nonlocal seen
        rows, tokens = writer.rows, writer.tokens
        advance(more, rows - seen[0], tokens - seen[1])
        seen = rows, tokens

    for part in piece.parts:
        done = 0
        for rows in read_rows(part):
            if part.chosen.kind == "text":
                texts.add(texts_of(rows))
            else:
                texts.flush()  # the corpus keeps the order of the input
            if part.chosen.kind == "tokens":
                beside = part.chosen.beside
                writer.add(*ids_of(rows, beside, job.tokenizer.info, job.tokenizer.vocab_size))
            if part.chosen.kind == "chat":
                _add_chats(job, rows, writer)
            else:
                writer.dropped["null"] += rows.values.null_count
            tell(rows.done - done)
            done = rows.done
        tell(part.size - done)
    texts.flush()
    written = writer.close()
    tell(0)
    record = job.record(piece)
    new = record.with_suffix(".new")
    new.write_text(written.model_dump_json())
    new.rename(record)
    return written


def _add_chats(job: Job, rows: Rows, writer: SequenceWriter) -> None:
    assert job.chat is not None
    for row, messages in enumerate(rows.values):
        if messages is None:
            writer.dropped["null"] += 1
            continue
        try:
            if not any(m["role"] == ASSISTANT for m in check_messages(messages)):
                writer.dropped["no assistant turn" if messages else "empty"] += 1
                continue
            tools = check_tools(rows.beside[row]) if rows.beside else None
            ids, labels = job.chat.encode(messages, tools)
        except CorpusError as error:
            raise CorpusError(f"{rows.where(row)}: {error}") from None
        writer.add(np.array([len(ids)], np.int32), ids, labels)


class _TextBuffer:
    """Collects texts until there are enough to tokenise together."""

    def __init__(self, tokenizer: Tokenizer, writer: SequenceWriter) -> None:
        self._tokenizer, self._writer = tokenizer, writer
        self._texts: list[str] = []
        self._characters = 0

    def add(self, texts: list[str]) -> None:
        self._texts += texts
        self._characters += sum(map(len, texts))
        if self._characters >= ENCODE_CHARACTERS or len(self._texts) >= ENCODE_TEXTS:
            self.flush()

    def flush(self) -> None:
        if self._texts:
            self._writer.add(*self._tokenizer.encode(self._texts))
        self._texts, self._characters = [], 0


def has_pieces(folder: Path) -> bool:
    """Whether there is anything that `resume` could use."""
    return all(any(folder.glob(f"part-*.{suffix}")) for suffix in ("json", "arrow"))


def resume(job: Job, pieces: Sequence[Piece]) -> dict[int, Written]:
    """What an earlier try has written of the pieces, by index; the rest is removed."""
    found: dict[int, Written] = {}
    keep = {LOCK_NAME}
    for piece in pieces:
        record = job.record(piece)
        try:
            written = Written.model_validate_json(record.read_text())
            whole = all((job.folder / f.name).stat().st_size == f.bytes for f in written.files)
        except (OSError, ValidationError):
            continue
        if whole:
            found[piece.index] = written
            keep |= {record.name, *(entry.name for entry in written.files)}
    for path in job.folder.iterdir():
        if path.name not in keep:
            path.unlink()
    return found


def forget_pieces(folder: Path) -> None:
    """Remove the records, when the corpus is finished."""
    for record in folder.glob("part-*.json"):
        record.unlink()
