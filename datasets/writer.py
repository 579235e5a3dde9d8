"""Streams sequences into the Arrow IPC files of a corpus, in bounded memory."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import BaseModel

from flexray.datasets.errors import CorpusError
from flexray.datasets.manifest import (
    FileEntry,
    Manifest,
    TokenizerInfo,
    count_lengths,
    length_histogram,
)

IGNORED_LABEL = -100  # torch's ignore_index
BATCH_TOKENS = 1 << 22  # tokens (16 MiB) or rows after which a record batch is written
BATCH_ROWS = 1 << 16
FILE_TOKENS = 1 << 28  # tokens (1 GiB) after which the next file is begun
_MAX_BATCH_TOKENS = (1 << 31) - 1  # list offsets are int32

IntArray = npt.NDArray[np.integer]


class Written(BaseModel, frozen=True):
    """What a `SequenceWriter` wrote, and which input rows it did not: `dropped` says why.

    `length_counts` is a `count_lengths`.
    """

    files: list[FileEntry]
    length_counts: list[int]
    dropped: dict[str, int]

    @property
    def rows(self) -> int:
        """Sequences."""
        return sum(entry.rows for entry in self.files)

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(entry.tokens for entry in self.files)


class SequenceWriter:
    """Writes sequences to files `NAME-NNNNN.arrow` in `folder`: a corpus, or a piece of one.

    Columns: `input_ids` list<int32>, `length` int32, `label_tokens` int32 and, where sequences
    come with labels, `labels` list<int32> (unshifted, -100 where nothing is to be learned).
    """

    def __init__(self, folder: Path, name: str = "part") -> None:
        self._folder, self._name = folder, name
        self._with_labels: bool | None = None  # the first block decides
        self._pending: list[tuple[IntArray, IntArray, IntArray | None]] = []
        self._pending_rows = self._pending_tokens = 0
        self._file: pa.ipc.RecordBatchFileWriter | None = None
        self._file_counts = np.zeros(3, np.int64)  # rows, tokens, label tokens of the open file
        self._files: list[FileEntry] = []
        self._length_counts = count_lengths(np.empty(0, np.int32))
        self.dropped: Counter[str] = Counter()
        self.rows = self.tokens = 0

    def add(self, lengths: IntArray, input_ids: IntArray, labels: IntArray | None = None) -> None:
        """Append a block of sequences.

        Args:
            lengths: (rows,) tokens of each sequence; zeros are counted as dropped ("empty").
            input_ids: (sum of lengths,) the sequences one after the other.
            labels: the same shape as `input_ids`; with every block, or with none.
        """
        if self._with_labels is None:
            self._with_labels = labels is not None
        if lengths.sum() != len(input_ids) or (labels is None) == self._with_labels:
            raise ValueError("lengths, input_ids and labels do not belong together")
        if labels is not None and len(labels) != len(input_ids):
            raise ValueError("labels and input_ids differ in length")
        full = lengths > 0
        if not full.all():
            self.dropped["empty"] += int(len(lengths) - full.sum())
            lengths = lengths[full]
        if not len(lengths):
            return
        self._pending.append((lengths, input_ids, labels))
        self._pending_rows += len(lengths)
        self._pending_tokens += len(input_ids)
        self.rows += len(lengths)
        self.tokens += len(input_ids)
        if self._pending_tokens >= BATCH_TOKENS or self._pending_rows >= BATCH_ROWS:
            self._flush()

    def close(self) -> Written:
        """Finish the last file."""
        self._flush()
        self._close_file()
        return Written(
            files=self._files,
            length_counts=self._length_counts.tolist(),
            dropped=dict(+self.dropped),
        )

    def _flush(self) -> None:
        if not self._pending:
            return
        lengths = np.concatenate([block[0] for block in self._pending])
        input_ids = np.concatenate([block[1] for block in self._pending])
        labels = [block[2] for block in self._pending if block[2] is not None]
        all_labels = np.concatenate(labels) if labels else None
        self._pending.clear()
        self._pending_rows = self._pending_tokens = 0
        ends = np.cumsum(lengths, dtype=np.int64)
        row = token = 0
        while row < len(lengths):  # once, unless a block is larger than int32 offsets reach
            stop = int(np.searchsorted(ends, token + _MAX_BATCH_TOKENS, side="right"))
            if stop == row:
                raise CorpusError(
                    f"a sequence of {lengths[row]} tokens is longer than the "
                    f"{_MAX_BATCH_TOKENS} that a corpus can hold; split it first"
                )
            piece = slice(token, int(ends[stop - 1]))
            self._write_batch(
                lengths[row:stop],
                input_ids[piece],
                None if all_labels is None else all_labels[piece],
            )
            row, token = stop, piece.stop

    def _write_batch(self, lengths: IntArray, input_ids: IntArray, labels: IntArray | None) -> None:
        offsets = np.zeros(len(lengths) + 1, np.int32)
        np.cumsum(lengths, out=offsets[1:])
        label_tokens = count_label_tokens(offsets, labels)
        columns = {"input_ids": _list_array(offsets, input_ids)}
        if labels is not None:
            columns["labels"] = _list_array(offsets, labels)
        columns["length"] = pa.array(lengths, pa.int32())
        columns["label_tokens"] = pa.array(label_tokens, pa.int32())
        batch = pa.record_batch(columns)
        if self._file is None:
            self._file = pa.ipc.new_file(self._part_path(), batch.schema)
        self._file.write_batch(batch)
        self._file_counts += (len(lengths), len(input_ids), label_tokens.sum())
        self._length_counts += count_lengths(lengths)
        if self._file_counts[1] >= FILE_TOKENS:
            self._close_file()

    def _part_path(self) -> Path:
        return self._folder / f"{self._name}-{len(self._files):05d}.arrow"

    def _close_file(self) -> None:
        if self._file is None:
            return
        self._file.close()
        path = self._part_path()
        rows, tokens, label_tokens = self._file_counts.tolist()
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        self._files.append(
            FileEntry(
                name=path.name,
                rows=rows,
                tokens=tokens,
                label_tokens=label_tokens,
                bytes=path.stat().st_size,
                sha256=digest,
            )
        )
        self._file = None
        self._file_counts[:] = 0


class CorpusWriter(SequenceWriter):
    """Writes a whole corpus into an empty folder."""

    def __init__(self, folder: Path, tokenizer: TokenizerInfo, vocab_size: int) -> None:
        super().__init__(folder)
        self._tokenizer, self._vocab_size = tokenizer, vocab_size

    def finish(self) -> Manifest:
        """Close the last file and write the manifest.

        Raises:
            CorpusError: no sequence was added.
        """
        return write_manifest(self._folder, self._tokenizer, self._vocab_size, [self.close()])


def write_manifest(
    folder: Path, tokenizer: TokenizerInfo, vocab_size: int, written: Iterable[Written]
) -> Manifest:
    """Write the manifest of a corpus whose files are all there.

    Args:
        folder: of the corpus.
        tokenizer: that made the token ids.
        vocab_size: token ids are below it.
        written: by all writers, in the order of the corpus's rows.

    Raises:
        CorpusError: no sequence was written.
    """
    files: list[FileEntry] = []
    length_counts = count_lengths(np.empty(0, np.int32))
    dropped: Counter[str] = Counter()
    for some in written:
        files += some.files
        length_counts += np.array(some.length_counts)
        dropped.update(some.dropped)
    if not files:
        lost = ", ".join(f"{rows} {why}" for why, rows in sorted(dropped.items()))
        raise CorpusError(
            "the input holds no sequence with a token in it"
            + (f" (dropped: {lost})" if lost else "")
        )
    manifest = Manifest(
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        rows=sum(entry.rows for entry in files),
        tokens=sum(entry.tokens for entry in files),
        label_tokens=sum(entry.label_tokens for entry in files),
        length_histogram=length_histogram(length_counts),
        dropped=dict(sorted(dropped.items())),
        files=files,
    )
    manifest.write(folder)
    return manifest


def count_label_tokens(offsets: IntArray, labels: IntArray | None) -> npt.NDArray[np.int32]:
    """Label tokens of each sequence after its own shift: its first label is never predicted.

    Args:
        offsets: (rows + 1,) where each sequence begins in `labels`, and the end; no row is empty.
        labels: (tokens,) unshifted, -100 where ignored; None means that every token is a label.
    """
    if labels is None:
        return (np.diff(offsets) - 1).astype(np.int32)
    counted = labels != IGNORED_LABEL
    counted[offsets[:-1]] = False
    before = np.concatenate([[0], np.cumsum(counted, dtype=np.int64)])
    return np.diff(before[offsets]).astype(np.int32)


def _list_array(offsets: IntArray, values: IntArray) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values, pa.int32()))
