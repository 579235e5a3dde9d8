"""manifest.json: what a corpus says about itself.

It is written last, so a folder that has one was finished. Every number in it is a count taken
while writing and is compared with the files when the corpus is opened.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt, ValidationError

from flexray.datasets.errors import CorpusError

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"


class TokenizerInfo(BaseModel, frozen=True):
    """Which tokenizer made the token ids.

    `sha256` is of its full definition, not of its name; `chat_template_sha256` of the template that
    rendered chats, None where there were none.
    """

    name: str
    sha256: str
    chat_template_sha256: str | None = None


class LengthBucket(BaseModel, frozen=True):
    """`rows` sequences have between `low` and `high` tokens, both included."""

    low: PositiveInt
    high: PositiveInt
    rows: PositiveInt


class FileEntry(BaseModel, frozen=True):
    """One Arrow IPC file of the corpus and what it must contain."""

    name: str = Field(pattern=r"^\w[\w.-]*$")
    rows: PositiveInt
    tokens: NonNegativeInt
    label_tokens: NonNegativeInt
    bytes: PositiveInt
    sha256: str


class Manifest(BaseModel, frozen=True):
    """Counts over the whole corpus. `dropped` maps a reason to the input rows lost to it."""

    format_version: int = FORMAT_VERSION
    tokenizer: TokenizerInfo
    vocab_size: PositiveInt
    rows: PositiveInt
    tokens: NonNegativeInt
    label_tokens: NonNegativeInt
    length_histogram: list[LengthBucket]
    dropped: dict[str, PositiveInt]
    files: list[FileEntry]

    @property
    def fingerprint(self) -> str:
        """Identity of the data itself: equal for equal files, wherever the folder lies."""
        return hashlib.sha256("".join(f.sha256 for f in self.files).encode()).hexdigest()

    def write(self, folder: Path) -> None:
        """Write manifest.json into `folder`."""
        text = self.model_dump_json(indent=2, exclude_none=True)
        (folder / MANIFEST_NAME).write_text(text + "\n")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read `folder`/manifest.json.

        Raises:
            CorpusError: there is none, it cannot be read, is broken, of a newer format, or
                contradicts itself.
        """
        path = folder / MANIFEST_NAME
        if not folder.is_dir():
            raise CorpusError(f"{folder}: no such corpus folder; make one with `flexray annotate`")
        try:
            raw = json.loads(path.read_text())
            version = raw["format_version"]
        except FileNotFoundError:
            raise CorpusError(
                f"{folder}: no {MANIFEST_NAME}, so not a finished corpus; "
                "make one with `flexray annotate`"
            ) from None
        except OSError as error:
            raise CorpusError(f"{path}: cannot be read ({error.strerror or error})") from None
        except (ValueError, KeyError, TypeError) as error:
            raise CorpusError(f"{path}: broken ({error!r}); annotate again") from None
        if version != FORMAT_VERSION:
            raise CorpusError(
                f"{path}: corpus format {version}, this FlexRay reads format {FORMAT_VERSION}; "
                "annotate again or use the FlexRay that wrote it"
            )
        try:
            manifest = cls.model_validate(raw)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise CorpusError(f"{path}: {where}: {first['msg']}; annotate again") from None
        for name in ("rows", "tokens", "label_tokens"):
            says = getattr(manifest, name)
            total = sum(getattr(entry, name) for entry in manifest.files)
            if says != total:
                raise CorpusError(
                    f"{path}: says {says} {name} but its files add up to {total}; annotate again"
                )
        return manifest


def count_lengths(lengths: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """Rows per power of two: entry k counts the lengths in [2^k, 2^(k+1)). Lengths are >= 1."""
    return np.bincount(np.frexp(lengths)[1] - 1, minlength=32).astype(np.int64)


def length_histogram(counts: npt.NDArray[np.int64]) -> list[LengthBucket]:
    """The non-empty buckets of (a sum of) `count_lengths`, as the manifest lists them."""
    return [
        LengthBucket(low=2**k, high=2 ** (k + 1) - 1, rows=int(rows))
        for k, rows in enumerate(counts)
        if rows
    ]
