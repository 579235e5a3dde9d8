"""Rows without a corpus, for measuring: only their lengths matter."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class RandomRows:
    """Row n has n random tokens, the same wherever it is read; every token is a label."""

    vocab_size: int

    def open(self) -> RandomRows:
        """Itself: there is nothing to open."""
        return self

    def read(self, row: int) -> tuple[npt.NDArray[np.int32], None]:
        """Token ids (row,)."""
        return np.random.default_rng(row).integers(self.vocab_size, size=row, dtype=np.int32), None
