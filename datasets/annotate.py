"""Makes a corpus: plans the pieces of the input, has them written, and joins them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flexray.datasets.chat import load_chat_tokenizer
from flexray.datasets.columns import Column
from flexray.datasets.corpus import Corpus
from flexray.datasets.errors import CorpusError
from flexray.datasets.piece_writer import (
    Advance,
    Job,
    forget_pieces,
    has_pieces,
    resume,
    write_piece,
)
from flexray.datasets.pieces import Piece, plan_pieces
from flexray.datasets.sources import Source, find_sources
from flexray.datasets.staging import staged_folder
from flexray.datasets.tokenizer import load_tokenizer
from flexray.datasets.writer import Written, write_manifest


@dataclass(frozen=True)
class Progress:
    """How far `annotate` is; bytes are of the input files as stored."""

    bytes_read: int
    bytes_total: int
    rows: int
    tokens: int


# Has pieces written, in any order, and gives what was written of each.
Runner = Callable[[Job, Sequence[Piece], Advance], dict[int, Written]]


def run_here(job: Job, pieces: Sequence[Piece], advance: Advance) -> dict[int, Written]:
    """Writes the pieces in this process, one after the other."""
    return {piece.index: write_piece(job, piece, advance) for piece in pieces}


def annotate(
    inputs: Iterable[str | Path],
    out: str | Path,
    tokenizer: str = "bytes",
    *,
    text_column: str | None = None,
    tokens_column: str | None = None,
    chat_column: str | None = None,
    overwrite: bool = False,
    progress: Callable[[Progress], None] | None = None,
    run: Runner = run_here,
) -> Corpus:
    """Write the corpus of all `inputs` to folder `out`, in bounded memory, and open it.

    The corpus depends on the input, the tokenizer and the columns only, not on how `run` works.
    When this is interrupted or fails, the pieces of the input that are finished are kept beside
    `out`, and the next call for `out` uses those that it would write alike.

    Args:
        inputs: files or folders, paths or URLs, or globs. JSON lines, Parquet and Arrow (file or
            stream) are told by their suffix and give a document a row; any other file is one
            document of plain text.
        out: appears when everything is written, or not at all.
        tokenizer: what `load_tokenizer` takes; for token ids, the tokenizer that made them.
        text_column: column with the text; by default "text".
        tokens_column: column with token ids, instead of text; "input_ids" where there is no text
            and no "messages". A column "labels" beside it holds as many labels, -100 where nothing
            is to be learned; or one of `columns.MASKS` holds as many 0 and 1.
        chat_column: column with chats, instead of text; "messages" where there is no text. What
            the assistant says is learned. A column "tools" beside it goes to the chat template.
        overwrite: replace a corpus that `out` already holds.
        progress: called after every block.
        run: how pieces are written.

    Raises:
        CorpusError: the input cannot be used, or `out` is taken.
    """
    column = Column(text_column, tokens_column, chat_column)
    out = Path(out)
    try:
        with staged_folder(out, overwrite=overwrite, keep=has_pieces) as folder:
            _write(folder, find_sources(inputs), column, tokenizer, progress, run)
    except OSError as error:  # reading turns its own into CorpusError
        raise CorpusError(f"{out}: cannot be written ({error.strerror or error})") from None
    return Corpus.open(out)


def _write(
    folder: Path,
    sources: list[Source],
    column: Column,
    tokenizer_name: str,
    progress: Callable[[Progress], None] | None,
    run: Runner,
) -> None:
    pieces = plan_pieces(sources, column)
    tokenizer = load_tokenizer(tokenizer_name)
    has_chats = any(part.chosen.kind == "chat" for piece in pieces for part in piece.parts)
    chat = load_chat_tokenizer(tokenizer_name) if has_chats else None
    job = Job(folder, tokenizer, chat)
    at = Progress(0, sum(piece.size for piece in pieces), 0, 0)

    def advance(bytes_read: int, rows: int, tokens: int) -> None:
        nonlocal at
        at = Progress(
            at.bytes_read + bytes_read, at.bytes_total, at.rows + rows, at.tokens + tokens
        )
        if progress:
            progress(at)

    written = resume(job, pieces)
    for piece in pieces:
        if piece.index in written:
            advance(piece.size, written[piece.index].rows, written[piece.index].tokens)
    written |= run(job, [piece for piece in pieces if piece.index not in written], advance)
    write_manifest(folder, job.info, tokenizer.vocab_size, (written[p.index] for p in pieces))
    forget_pieces(folder)
