"""The batches that a simulation plans: which rows of the input, and what was left out."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from flexray.errors import UserError
from flexray.length_source import Lengths
from flexray.planning_input import Limit, OverLength, admitted


@dataclass(frozen=True)
class Batches:
    """Full batches of rows in input order.

    Attributes:
        first: number of the first batch, counted from 0 in the input.
        limit: rows of more tokens were left out.
        lengths: tokens of each row, one (rows,) a batch.
        over_long: rows left out between the first and the last row of the batches.
    """

    first: int
    limit: int
    lengths: tuple[Lengths, ...]
    over_long: int

    @classmethod
    def cut(
        cls, lengths: Lengths, limit: Limit, policy: OverLength, size: int, first: int, steps: int
    ) -> Batches:
        """At most `steps` batches of `size` rows; over-long rows are removed first.

        Raises:
            UserError: a row that is refused, or no full batch of rows with tokens.
        """
        for option, value, least in (
            ("--batch-size", size, 1),
            ("--steps", steps, 1),
            ("--first-batch", first, 0),
        ):
            if value < least:
                raise UserError(f"{option} {value}: give at least {least}")
        rows = admitted(lengths, limit, policy)
        full = len(rows) // size
        if full <= first:
            raise UserError(
                f"{len(rows)} rows of at most {limit.tokens} tokens make {full} full batches "
                f"of {size} and batch {first} was asked for (they count from 0): use a "
                "smaller --batch-size or --first-batch"
            )
        rows = rows[first * size : min(first + steps, full) * size]
        over_long = int(rows[-1] - rows[0]) + 1 - len(rows)
        batches = cls(
            first, limit.tokens, tuple(np.split(lengths[rows], len(rows) // size)), over_long
        )
        if not batches.longest:
            raise UserError("all rows have length 0: there is nothing to plan")
        return batches

    @property
    def size(self) -> int:
        """Rows of a batch."""
        return len(self.lengths[0])

    @property
    def rows(self) -> int:
        """Rows of all batches."""
        return self.size * len(self.lengths)

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return int(max(batch.max() for batch in self.lengths))

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return int(sum(batch.sum() for batch in self.lengths))

    @property
    def zero_length(self) -> int:
        """Rows of length 0: no plan has them."""
        return int(sum((batch == 0).sum() for batch in self.lengths))

    @property
    def digest(self) -> str:
        """Tells these lengths from others."""
        return hashlib.sha256(np.concatenate(self.lengths).tobytes()).hexdigest()
