"""What the benchmark of training trains on: the built-in corpus, and lengths like GitHub's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from flexray.datasets.tokenizer import BytesTokenizer
from flexray.datasets.writer import CorpusWriter
from flexray.length_source import read_lengths

LENGTHS = Path(__file__).resolve().parents[1] / "datasets" / "lengths" / "github.parquet"
LIMIT = 49_152  # tokens of GitHub's files; longer ones (0.6%) are left out
VOCABULARY = 256


def scaled(lengths: npt.NDArray[np.int64], longest: int) -> npt.NDArray[np.int64]:
    """GitHub's lengths up to LIMIT, so much shorter that LIMIT becomes `longest`; at least 2."""
    kept = lengths[lengths <= LIMIT]
    return np.maximum(2, kept * longest // LIMIT)


def github_like(folder: Path, longest: int) -> Path:
    """A corpus of random tokens in `folder` with these lengths."""
    folder.mkdir()
    lengths = scaled(read_lengths(str(LENGTHS)), longest)
    writer = CorpusWriter(folder, BytesTokenizer().info, VOCABULARY)
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, lengths.sum(), dtype=np.int32)
    writer.add(lengths, tokens)
    writer.finish()
    return folder
