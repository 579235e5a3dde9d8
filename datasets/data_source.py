"""Where the rows of a run come from: what every actor is told, and opens for itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flexray.datasets.corpus import Corpus
from flexray.datasets.documents import Documents, OverLength


@dataclass(frozen=True)
class DataSource:
    """What every actor opens for itself: tokens never pass through the driver."""

    corpus: Path
    max_length: int
    over_length: OverLength

    def open(self) -> Documents:
        """The rows to train on. Raises CorpusError."""
        return Documents(Corpus.open(self.corpus), self.max_length, self.over_length)
