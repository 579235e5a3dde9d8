"""A corpus: token sequences on disk, opened without reading a token.

A folder with `manifest.json` and Arrow IPC files (`writer.py` says which columns). Opening reads
the `length` and `label_tokens` columns and checks them against the manifest and against the list
offsets of the tokens; tokens are memory-mapped and read by row id.
"""

from __future__ import annotations

import mmap
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flexray.datasets.errors import CorpusError
from flexray.datasets.manifest import FileEntry, Manifest

_Lists = tuple[npt.NDArray[np.integer], npt.NDArray[np.int32]]
_AT_A_TIME = 1 << 16  # rows that are checked together: bounds the memory
_LISTS = (pa.list_(pa.int32()), pa.large_list(pa.int32()))


class Corpus:
    """Read-only view of one corpus folder. Make it with `Corpus.open`.

    Attributes:
        path: the folder.
        manifest: what the corpus says about itself.
        lengths: (rows,) int32, tokens of each sequence.
        has_labels: whether it has a `labels` column; without one, every token is a label.
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        lengths: npt.NDArray[np.int32],
        label_tokens: npt.NDArray[np.int32] | None,
        batches: list[_BatchPlace],
    ) -> None:
        self.path, self.manifest = path, manifest
        self.lengths, self._label_tokens = lengths, label_tokens
        self.has_labels = label_tokens is not None
        self._batches = batches
        self._ends = np.cumsum([place.rows for place in batches])
        # Mapped when first read: a driver plans with the counts and never reads a token.
        self._readers: dict[str, pa.ipc.RecordBatchFileReader] = {}
        self._mapped: dict[tuple[str, int], _Lists] = {}

    @classmethod
    def open(cls, path: Path | str) -> Corpus:
        """Open and check the corpus in folder `path`.

        Raises:
            CorpusError: anything about it that is missing, truncated or contradictory.
        """
        path = Path(path).absolute()
        manifest = Manifest.read(path)
        lengths = np.empty(manifest.rows, np.int32)
        label_tokens = np.empty(manifest.rows, np.int32)  # no memory before it is written to
        batches: list[_BatchPlace] = []
        labelled = set()
        start = 0
        for entry in manifest.files:
            stop = start + entry.rows
            places, has_labels = _check_file(
                path / entry.name, entry, lengths[start:stop], label_tokens[start:stop]
            )
            batches += places
            labelled.add(has_labels)
            start = stop
        if not lengths.any():
            raise CorpusError(
                f"{path}: all {manifest.rows} lengths are 0; a length counts tokens: annotate again"
            )
        if len(labelled) > 1:
            raise CorpusError(f"{path}: only some of its files have labels; annotate again")
        return cls(path, manifest, lengths, label_tokens if labelled.pop() else None, batches)

    def __reduce__(self) -> tuple[Callable[[Path], Corpus], tuple[Path]]:
        return Corpus.open, (self.path,)

    @cached_property
    def label_tokens(self) -> npt.NDArray[np.int32]:
        """(rows,) int32, labels of each sequence after its own shift."""
        if self._label_tokens is None:
            counts = self.lengths - 1
            return np.maximum(counts, 0, out=counts)
        return self._label_tokens

    @property
    def rows(self) -> int:
        """Number of sequences."""
        return self.manifest.rows

    @property
    def vocab_size(self) -> int:
        """Token ids are in [0, vocab_size)."""
        return self.manifest.vocab_size

    def tokens(self, row: int) -> npt.NDArray[np.int32]:
        """(length,) the token ids of a row: a read-only view of the mapped file, no copy.

        Raises:
            IndexError: `row` is not in [0, rows).
        """
        return self._read("input_ids", row)

    def labels(self, row: int) -> npt.NDArray[np.int32] | None:
        """(length,) the row's unshifted labels, -100 where ignored; None if all tokens count."""
        return self._read("labels", row) if self.has_labels else None

    def _read(self, column: str, row: int) -> npt.NDArray[np.int32]:
        row = operator.index(row)
        if not 0 <= row < self.rows:
            raise IndexError(f"row {row} is not in {self.path}: its rows are 0 to {self.rows - 1}")
        index = int(np.searchsorted(self._ends, row, side="right"))
        offsets, values = self._lists(column, index)
        at = row - int(self._ends[index])  # from the batch's end, so negative
        return values[offsets[at - 1] : offsets[at]]

    def _lists(self, column: str, index: int) -> _Lists:
        """Offsets and values of the lists of a record batch, both in the mapped file."""
        if (column, index) not in self._mapped:
            place = self._batches[index]
            if place.file not in self._readers:
                memory = pa.memory_map(str(self.path / place.file))
                self._readers[place.file] = pa.ipc.open_file(memory)
            lists = self._readers[place.file].get_batch(place.index).column(column)
            self._mapped[column, index] = lists.offsets.to_numpy(), lists.values.to_numpy()
        return self._mapped[column, index]


@dataclass(frozen=True, slots=True)
class _BatchPlace:
    """Which record batch of which file, and its rows."""

    file: str
    index: int
    rows: int


def _check_file(
    path: Path,
    entry: FileEntry,
    lengths: npt.NDArray[np.int32],
    label_tokens: npt.NDArray[np.int32],
) -> tuple[list[_BatchPlace], bool]:
    """Check a file against its manifest entry, fill in its counts, and see if it has labels.

    `label_tokens` are written to only if it has.
    """
    try:
        size = path.stat().st_size
        if size != entry.bytes:
            raise CorpusError(
                f"{path}: {size} bytes where the manifest says {entry.bytes}; "
                "copy the corpus again or annotate again"
            )
        with path.open("rb") as file:
            memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        reader = pa.ipc.open_file(pa.py_buffer(memory))
        places: list[_BatchPlace] = []
        rows = labels = 0
        for index in range(reader.num_record_batches):
            batch = reader.get_batch(index)
            batch.validate()
            if rows + batch.num_rows > entry.rows:
                raise _BatchError(f"it has more than the {entry.rows} rows of the manifest")
            for start in range(0, batch.num_rows, _AT_A_TIME):
                part = batch.slice(start, _AT_A_TIME)
                at = slice(rows, rows + part.num_rows)
                labels += _read_counts(part, lengths[at], label_tokens[at])
                rows = at.stop
                # Pages looked at would go on counting as this process's memory.
                memory.madvise(mmap.MADV_DONTNEED)
            places.append(_BatchPlace(entry.name, index, batch.num_rows))
        if rows != entry.rows:
            raise _BatchError(f"it has {rows} rows where the manifest says {entry.rows}")
    except FileNotFoundError:
        raise CorpusError(
            f"{path}: missing, but the manifest lists it; copy the corpus again or annotate again"
        ) from None
    except (pa.ArrowException, OSError, KeyError, _BatchError) as error:
        raise CorpusError(f"{path}: cannot be used ({error}); annotate again") from None
    tokens = int(lengths.sum(dtype=np.int64))
    for name, total, says in (
        ("tokens", tokens, entry.tokens),
        ("label_tokens", labels, entry.label_tokens),
    ):
        if total != says:
            raise CorpusError(
                f"{path}: holds {total} {name} where the manifest says {says}; annotate again"
            )
    return places, "labels" in reader.schema.names


class _BatchError(Exception):
    """A record batch that contradicts itself; reported with its file's name."""


def _read_counts(
    batch: pa.RecordBatch,
    lengths: npt.NDArray[np.int32],
    label_tokens: npt.NDArray[np.int32],
) -> int:
    """Check a batch, fill in its lengths and, if it has labels, `label_tokens`; their sum."""
    lengths[:], counts = _whole_numbers(batch, "length"), _whole_numbers(batch, "label_tokens")
    names, most = ["input_ids"], np.maximum(lengths - 1, 0)
    if "labels" in batch.schema.names:
        names.append("labels")
        if (counts > most).any():
            raise _BatchError("label_tokens must not be more than length - 1")
        label_tokens[:] = counts
    elif (counts != most).any():
        raise _BatchError("label_tokens must be length - 1 where there are no labels")
    for name in names:
        column = batch.column(name)
        if column.type not in _LISTS or column.null_count or column.values.null_count:
            raise _BatchError(f"column {name} must hold lists of int32 without nulls")
        if (np.diff(column.offsets.to_numpy()) != lengths).any():
            raise _BatchError(f"length differs from the number of {name}")
    return int(counts.sum(dtype=np.int64))


def _whole_numbers(batch: pa.RecordBatch, name: str) -> npt.NDArray[np.int32]:
    column = batch.column(name)
    if column.type != pa.int32() or column.null_count:
        raise _BatchError(f"column {name} must be int32 without nulls")
    values: npt.NDArray[np.int32] = column.to_numpy()
    if (values < 0).any():
        raise _BatchError(f"column {name} holds negative numbers")
    return values
