"""Which files an input names, and what kind of file each is."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pyarrow as pa

from flexray.datasets.errors import CorpusError
from flexray.datasets.manifest import MANIFEST_NAME

Kind = Literal["text", "jsonl", "parquet", "arrow"]

_KINDS: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
}
_COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}


@dataclass(frozen=True)
class Source:
    """One input file; `size` in bytes as stored."""

    path: Path
    kind: Kind
    size: int
    compression: str | None = None

    def open(self) -> pa.NativeFile:
        """The file as stored, memory-mapped."""
        return pa.memory_map(str(self.path)) if self.size else pa.BufferReader(b"")

    def decompress(self, stored: pa.NativeFile) -> pa.NativeFile:
        """The contents of an opened file."""
        if self.compression is None:
            return stored
        return pa.CompressedInputStream(stored, self.compression)


def find_sources(inputs: Iterable[str | Path]) -> list[Source]:
    """The files that `inputs` name, in their order; folders are walked in sorted order.

    In a folder, names that begin with a dot and `__pycache__` are passed over, symbolic links to
    folders are not followed, and where Hugging Face `save_to_disk` left a `state.json`, the data
    files that it lists are taken.

    Raises:
        CorpusError: an input does not exist, is a corpus already, or holds no file.
    """
    sources: list[Source] = []
    for given in inputs:
        path = Path(given)
        if path.is_dir():
            found = _walk(path)
            if not found:
                raise CorpusError(f"{path}: the folder holds no files")
        elif path.exists():
            found = [path]
        else:
            raise CorpusError(f"{path}: no such file or folder")
        sources += map(_classify, found)
    if not sources:
        raise CorpusError("no input given")
    return sources


def _walk(root: Path) -> list[Path]:
    found: list[Path] = []
    for folder, folders, files in os.walk(root, onerror=_refuse_unreadable):
        folders[:] = sorted(n for n in folders if not n.startswith(".") and n != "__pycache__")
        here = Path(folder)
        if MANIFEST_NAME in files and any(n.endswith(".arrow") for n in files):
            raise CorpusError(f"{here}: is a corpus already; give what it was made from")
        if "dataset_dict.json" in files:  # the splits of a save_to_disk folder are its subfolders
            continue
        if {"state.json", "dataset_info.json"} <= set(files):
            found += _saved_files(here / "state.json")
            continue
        found += [here / n for n in sorted(files) if not n.startswith(".")]
    return found


def _saved_files(state: Path) -> list[Path]:
    try:
        entries = json.loads(state.read_text())["_data_files"]
        return [state.parent / entry["filename"] for entry in entries]
    except (ValueError, KeyError, TypeError) as error:
        raise CorpusError(f"{state}: not as `save_to_disk` writes it ({error!r})") from None


def _refuse_unreadable(error: OSError) -> None:
    raise CorpusError(f"{error.filename}: cannot be read ({error.strerror})")


def _classify(path: Path) -> Source:
    compression = _COMPRESSIONS.get(path.suffix.lower())
    suffix = (path.with_suffix("") if compression else path).suffix.lower()
    try:
        source = Source(path, _KINDS.get(suffix, "text"), path.stat().st_size, compression)
        if suffix == ".json":
            return Source(path, _sniff_json(source), source.size, compression)
    except OSError as error:
        raise CorpusError(f"{path}: cannot be read ({error})") from None
    return source


def _sniff_json(source: Source) -> Kind:
    """JSON lines are often called .json; any other JSON object is a text like source code is."""
    with source.open() as stored:
        start = source.decompress(stored).read(1 << 24).lstrip()
    if start.startswith(b"["):
        raise CorpusError(
            f"{source.path}: is one JSON array; give one object a line (jq -c '.[]' FILE)"
        )
    first, newline, _ = start.partition(b"\n")
    try:
        return "jsonl" if newline and isinstance(json.loads(first), dict) else "text"
    except ValueError:
        return "text"
