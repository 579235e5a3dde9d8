"""What the benchmark of training trains on: random tokens in rows of the lengths of real ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from flexray.datasets.builtin import builtin_corpus
from flexray.datasets.tokenizer import BytesTokenizer
from flexray.datasets.writer import CorpusWriter
from flexray.length_source import read_lengths

LENGTHS = Path(__file__).resolve().parents[1] / "datasets" / "lengths"
VOCABULARY = 256
CORPORA = ("builtin", "github")


@dataclass(frozen=True)
class Rows:
    """How real rows become shorter ones, as the models are smaller.

    A `scale`-th of each length, at least 2; those that stay longer than `longest` are left out.
    """

    scale: int
    longest: int

    def of(self, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The shorter lengths."""
        return np.maximum(2, lengths[lengths <= self.scale * self.longest] // self.scale)


def write_corpus(name: str, folder: Path, rows: Rows) -> Path:
    """A corpus in `folder`. `name`: whose lengths. Raises CorpusError without the built-in one."""
    source = builtin_corpus() if name == "builtin" else LENGTHS / f"{name}.parquet"
    lengths = rows.of(read_lengths(str(source)))
    folder.mkdir()
    writer = CorpusWriter(folder, BytesTokenizer().info, VOCABULARY)
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, lengths.sum(), dtype=np.int32)
    writer.add(lengths, tokens)
    writer.finish()
    return folder
