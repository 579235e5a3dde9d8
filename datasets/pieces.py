"""Cuts the input into pieces: what one task reads and writes by itself.

The cuts follow from the input alone, so a corpus does not depend on how many tasks made it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from flexray.datasets.columns import Column
from flexray.datasets.errors import CorpusError
from flexray.datasets.manifest import TokenizerInfo
from flexray.datasets.parts import Part
from flexray.datasets.readers import cut
from flexray.datasets.sources import Source

PIECES = 1024  # as many as there may be, within these sizes in bytes of the files as stored
SMALLEST = 1 << 24
LARGEST = 1 << 30
_LIBRARIES = ("tokenizers", "transformers", "jinja2")  # that pieces may be written with


@dataclass(frozen=True)
class Piece:
    """Consecutive parts of the input."""

    index: int
    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        """Bytes of the files as stored."""
        return sum(part.size for part in self.parts)

    @property
    def name(self) -> str:
        """What its files are called."""
        return f"part-{self.index:05d}"

    def key(self, tokenizer: TokenizerInfo) -> str:
        """Equal for the same work by the same code on unchanged files.

        Files are told by their size and time of change, code by `code_version`.
        """
        parts = [dataclasses.asdict(part) for part in self.parts]
        for part in parts:
            source = part["source"]
            source["name"] = "" if source["url"] else str(Path(source["path"]).absolute())
        made_by = tokenizer.model_dump(exclude={"name"})
        work = json.dumps([code_version(Path(__file__).parent), made_by, parts])
        return hashlib.sha256(work.encode()).hexdigest()[:16]


@functools.cache
def code_version(folder: Path) -> str:
    """Another one for other code in `folder` or other libraries, so that no number is forgotten."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode() + path.read_bytes())
    for name in _LIBRARIES:
        digest.update(f"{name} {metadata.version(name)}\n".encode())
    return digest.hexdigest()


def plan_pieces(sources: list[Source], column: Column) -> list[Piece]:
    """The pieces of all sources, in their order.

    Raises:
        CorpusError: a source is broken, has no such column, or alone has (or lacks) labels.
    """
    total = sum(source.size for source in sources)
    most = min(max(total // PIECES, SMALLEST), LARGEST)
    with ThreadPoolExecutor(16) as pool:  # for those that are far away
        found = pool.map(lambda source: cut(source, column, most), sources)
        parts = [part for some in found for part in some]
    for part in parts:
        if part.chosen.has_labels != parts[0].chosen.has_labels:
            raise CorpusError(
                f"{part.source.name}: {'' if part.chosen.has_labels else 'no '}labels, unlike the "
                "input before it; give all of the input labels, or none"
            )
    return [Piece(i, tuple(group)) for i, group in enumerate(_grouped(parts, most))]


def _grouped(parts: Iterable[Part], most: int) -> Iterator[list[Part]]:
    """Consecutive parts that together have not more than `most` bytes, or one part."""
    group: list[Part] = []
    size = 0
    for part in parts:
        if group and size + part.size > most:
            yield group
            group, size = [], 0
        last = group[-1] if group else None
        if last and last.source == part.source and last.stop == part.start:
            group[-1] = dataclasses.replace(last, stop=part.stop, size=last.size + part.size)
        else:
            group.append(part)
        size += part.size
    if group:
        yield group
