"""Makes a corpus: reads documents, tokenises them, counts, and writes Arrow files."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from flexray.datasets.corpus import Corpus
from flexray.datasets.errors import CorpusError
from flexray.datasets.readers import Column, read_rows
from flexray.datasets.sources import Source, find_sources
from flexray.datasets.staging import staged_folder
from flexray.datasets.tokenizer import Tokenizer, load_tokenizer
from flexray.datasets.values import ids_of, texts_of
from flexray.datasets.writer import CorpusWriter

_ENCODE_CHARACTERS = 1 << 22  # texts are tokenised together, so that small files use all cores
_ENCODE_TEXTS = 4096


@dataclass(frozen=True)
class Progress:
    """How far `annotate` is; bytes are of the input files as stored."""

    bytes_read: int
    bytes_total: int
    rows: int
    tokens: int


def annotate(
    inputs: Iterable[str | Path],
    out: str | Path,
    tokenizer: str = "bytes",
    *,
    text_column: str | None = None,
    tokens_column: str | None = None,
    overwrite: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> Corpus:
    """Write the corpus of all `inputs` to folder `out`, in bounded memory, and open it.

    Args:
        inputs: files or folders. JSON lines, Parquet and Arrow (file or stream) are told by their
            suffix and give a document a row; any other file is one document of plain text.
        out: appears when everything is written, or not at all.
        tokenizer: what `load_tokenizer` takes; for token ids, the tokenizer that made them.
        text_column: column with the text; by default "text".
        tokens_column: column with token ids, instead of text; "input_ids" where there is no text.
            A column "labels" beside it holds as many labels, -100 where nothing is to be learned.
        overwrite: replace a corpus that `out` already holds.
        progress: called after every block.

    Raises:
        CorpusError: the input cannot be used, or `out` is taken.
    """
    if text_column and tokens_column:
        raise CorpusError("give a text column or a tokens column, not both")
    column = Column(text_column, tokens_column)
    out = Path(out)
    try:
        with staged_folder(out, overwrite=overwrite) as folder:
            _write(folder, find_sources(inputs), column, load_tokenizer(tokenizer), progress)
    except OSError as error:  # reading turns its own into CorpusError
        raise CorpusError(f"{out}: cannot be written ({error.strerror or error})") from None
    return Corpus.open(out)


def _write(
    folder: Path,
    sources: list[Source],
    column: Column,
    tokenizer: Tokenizer,
    progress: Callable[[Progress], None] | None,
) -> None:
    writer = CorpusWriter(folder, tokenizer.info, tokenizer.vocab_size)
    texts = _TextBuffer(tokenizer, writer)
    labelled: bool | None = None
    total, done = sum(source.size for source in sources), 0
    for source in sources:
        for rows in read_rows(source, column):
            has_labels = rows.labels is not None
            if labelled is not None and has_labels != labelled:
                raise CorpusError(
                    f"{source.path}: {'' if has_labels else 'no '}labels, unlike the input before "
                    "it; give all of the input labels, or none"
                )
            labelled = has_labels
            if rows.values.null_count:
                writer.dropped["null"] += rows.values.null_count
            if rows.are_tokens:
                texts.flush()  # the corpus keeps the order of the input
                writer.add(*ids_of(rows, tokenizer.info, tokenizer.vocab_size))
            else:
                texts.add(texts_of(rows))
            if progress:
                progress(Progress(done + rows.position, total, writer.rows, writer.tokens))
        done += source.size
    texts.flush()
    writer.finish()
    if progress:
        progress(Progress(total, total, writer.rows, writer.tokens))


class _TextBuffer:
    """Collects texts until there are enough to tokenise together."""

    def __init__(self, tokenizer: Tokenizer, writer: CorpusWriter) -> None:
        self._tokenizer, self._writer = tokenizer, writer
        self._texts: list[str] = []
        self._characters = 0

    def add(self, texts: list[str]) -> None:
        self._texts += texts
        self._characters += sum(map(len, texts))
        if self._characters >= _ENCODE_CHARACTERS or len(self._texts) >= _ENCODE_TEXTS:
            self.flush()

    def flush(self) -> None:
        if self._texts:
            self._writer.add(*self._tokenizer.encode(self._texts))
        self._texts, self._characters = [], 0
