"""Where the rows of a run come from: what every actor is told, and opens for itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from flexray.datasets.corpus import Corpus
from flexray.datasets.documents import Documents, OverLength
from flexray.datasets.mixture import Mixture


class Rows(Protocol):
    """What an actor reads its rows from."""

    def read(self, row: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32] | None]:
        """Token ids and unshifted labels (None: every token is one) of a row, (length,) each."""


class RowSource(Protocol):
    """What actors can open for themselves."""

    def open(self) -> Rows:
        """All rows."""


@dataclass(frozen=True)
class DataSource:
    """What every actor opens for itself: tokens never pass through the driver.

    Attributes:
        corpora: folders that are trained on.
        max_length, over_length: see `Documents`; they hold for every corpus.
        weights: share of the sequences that each corpus gives, against the others.
        validation: a corpus, or how many sequences of the others are held out.
    """

    corpora: tuple[Path, ...]
    max_length: int
    over_length: OverLength
    weights: tuple[float, ...] = (1.0,)
    validation: Path | int = 0

    def open(self) -> Mixture:
        """All rows of the run, numbered through. Raises CorpusError."""
        held = self.validation
        validation = self._view(held) if isinstance(held, Path) else held
        return Mixture([self._view(corpus) for corpus in self.corpora], self.weights, validation)

    def _view(self, corpus: Path) -> Documents:
        return Documents(Corpus.open(corpus), self.max_length, self.over_length)
