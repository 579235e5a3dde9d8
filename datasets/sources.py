"""Which files an input names, and what kind of file each is."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Literal

import pyarrow as pa

from flexray.datasets.errors import CorpusError
from flexray.datasets.locations import Location, open_file
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
    """One input file.

    Attributes:
        name: what messages call it: its path, or its URL.
        url: says which file system `path` is on; empty for local files.
        size: in bytes, as stored.
        modified: when, in ns; 0 where the file system does not say.
    """

    name: str
    url: str
    path: str
    kind: Kind
    size: int
    modified: int = 0
    compression: str | None = None

    def open(self) -> pa.NativeFile:
        """The file as stored, memory-mapped where it is local."""
        return open_file(self.url, self.path)

    def decompress(self, stored: pa.NativeFile) -> pa.NativeFile:
        """The contents of an opened file."""
        if self.compression is None:
            return stored
        return pa.CompressedInputStream(stored, self.compression)


def find_sources(inputs: Iterable[str | Path]) -> list[Source]:
    """The files that `inputs` name, in their order; folders are walked in sorted order.

    Inputs are local paths or URLs, of files or folders, or globs of them. In a folder, names that
    begin with a dot and `__pycache__` are passed over, symbolic links to folders are not followed,
    and where Hugging Face `save_to_disk` left a `state.json`, the data files that it lists are
    taken.

    Raises:
        CorpusError: an input does not exist, is a corpus already, or holds no file.
    """
    sources: list[Source] = []
    for given in inputs:
        at = Location(str(given))
        for path in at.matches():
            if not at.stat(path)[0]:
                sources.append(_classify(at, path))
                continue
            found = _walk(at, path)
            if not found:
                raise CorpusError(f"{at.name(path)}: the folder holds no files")
            sources += [_classify(at, file) for file in found]
    if not sources:
        raise CorpusError("no input given")
    return sources


def _walk(at: Location, root: str) -> list[str]:
    found: list[str] = []
    for here, folders, files in at.walk(root):
        folders[:] = sorted(n for n in folders if not n.startswith(".") and n != "__pycache__")
        if MANIFEST_NAME in files and any(n.endswith(".arrow") for n in files):
            raise CorpusError(f"{at.name(here)}: is a corpus already; give what it was made from")
        if "dataset_dict.json" in files:  # the splits of a save_to_disk folder are its subfolders
            continue
        names = sorted(n for n in files if not n.startswith("."))
        if {"state.json", "dataset_info.json"} <= set(files):
            names = _saved_files(at, posixpath.join(here, "state.json"))
        found += [posixpath.join(here, name) for name in names]
    return found


def _saved_files(at: Location, state: str) -> list[str]:
    try:
        with open_file(at.url, state) as file:
            return [entry["filename"] for entry in json.loads(file.read())["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise CorpusError(
            f"{at.name(state)}: not as `save_to_disk` writes it ({error!r})"
        ) from None


def _classify(at: Location, path: str) -> Source:
    _, size, modified = at.stat(path)
    pure = PurePath(path)
    compression = _COMPRESSIONS.get(pure.suffix.lower())
    suffix = (pure.with_suffix("") if compression else pure).suffix.lower()
    kind = _KINDS.get(suffix, "text")
    source = Source(at.name(path), at.url, path, kind, size, modified, compression)
    if suffix != ".json":
        return source
    try:
        kind = _sniff_json(source)
    except OSError as error:
        raise CorpusError(f"{source.name}: cannot be read ({error})") from None
    return Source(source.name, at.url, path, kind, size, modified, compression)


def _sniff_json(source: Source) -> Kind:
    """JSON lines are often called .json; any other JSON object is a text like source code is."""
    with source.open() as stored:
        start = source.decompress(stored).read(1 << 24).lstrip()
    if start.startswith(b"["):
        raise CorpusError(
            f"{source.name}: is one JSON array; give one object a line (jq -c '.[]' FILE)"
        )
    first, newline, _ = start.partition(b"\n")
    try:
        return "jsonl" if newline and isinstance(json.loads(first), dict) else "text"
    except ValueError:
        return "text"
