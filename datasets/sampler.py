"""The order in which rows are trained on: one global cursor over seeded permutations."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from flexray.datasets.errors import CorpusError
from flexray.datasets.permutation import Permutation


class Sampler:
    """Deals row ids in global batches; every epoch visits every row exactly once.

    The state is the cursor (seed, epoch, position) and nothing of the cluster: it loads at any
    world size and with another batch size. An epoch's last batch is short if the rows do not
    divide; the next batch begins a new epoch in a new order.

    Raises:
        CorpusError: nothing to sample, or a batch size or seed that makes no sense.
    """

    def __init__(self, rows: int, batch_sequences: int, seed: int) -> None:
        if rows < 1:
            raise CorpusError(f"cannot sample from {rows} rows")
        if batch_sequences < 1:
            raise CorpusError(f"a batch needs at least 1 sequence, not {batch_sequences}")
        if seed < 0:
            raise CorpusError(f"the seed must be 0 or more, not {seed}")
        self.rows, self.batch_sequences, self.seed = rows, batch_sequences, seed
        self._move_to(epoch=0, position=0)

    def _move_to(self, epoch: int, position: int) -> None:
        self.epoch, self.position = epoch, position
        self._order = Permutation(self.rows, self.seed, epoch)

    def next(self) -> npt.NDArray[np.int64]:
        """(batch_sequences,) row ids of the next global batch, fewer at the end of an epoch."""
        stop = min(self.position + self.batch_sequences, self.rows)
        batch = self._order(np.arange(self.position, stop, dtype=np.int64))
        if stop == self.rows:
            self._move_to(self.epoch + 1, 0)
        else:
            self.position = stop
        return batch

    def state_dict(self) -> dict[str, int]:
        """The cursor before the next batch, as plain integers."""
        return {
            "rows": self.rows,
            "seed": self.seed,
            "epoch": self.epoch,
            "position": self.position,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue where `state` was saved.

        Raises:
            CorpusError: it was saved for other rows or another seed, or is not a cursor.
        """
        if set(state) != {"rows", "seed", "epoch", "position"}:
            raise CorpusError(f"not a sampler state: it has the keys {sorted(state)}")
        for name, have in (("rows", self.rows), ("seed", self.seed)):
            if state[name] != have:
                raise CorpusError(
                    f"the sampler was saved with {name} {state[name]} and this run has {have}; "
                    "resume with the same corpus, max_length, over-length policy and seed"
                )
        epoch, position = state["epoch"], state["position"]
        if epoch < 0 or not 0 <= position < self.rows:
            raise CorpusError(
                f"the sampler state points to epoch {epoch}, position {position}; "
                f"positions are 0 to {self.rows - 1}"
            )
        self._move_to(epoch, position)
