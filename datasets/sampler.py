"""The order in which rows are trained on: one global cursor over seeded permutations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flexray.datasets.errors import CorpusError
from flexray.datasets.permutation import Permutation
from flexray.datasets.proportions import MAX_DRAWS, deal, dealt

_HELD_OUT = 0x56414C  # seeds the order that decides which rows are held out, whatever a run's seed
_REMEDY = (
    "resume with the same corpora, weights, max_length, over-length policy, held-out sequences "
    "and seed"
)

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Stream:
    """The rows of one corpus that are trained on.

    Attributes:
        rows: sequences of the corpus.
        held_out: how many of them are never dealt; which ones, no seed of a run changes.
        weight: its share of the sequences dealt, against other streams'.
        corpus: a number that is another one for other data.
    """

    rows: int
    held_out: int = 0
    weight: int = 1
    corpus: int = 0

    @property
    def trained(self) -> int:
        """Rows in one epoch."""
        return self.rows - self.held_out

    def trained_rows(self, positions: Rows) -> Rows:
        """(n,) ids within the corpus of the `positions`-th rows that are trained on."""
        return self._split(positions + self.held_out)

    def held_out_rows(self) -> Rows:
        """(held_out,) ids within the corpus, ascending."""
        return np.sort(self._split(np.arange(self.held_out, dtype=np.int64)))

    def _split(self, positions: Rows) -> Rows:
        return Permutation(self.rows, _HELD_OUT, 0)(positions) if self.held_out else positions


class Sampler:
    """Deals row ids in global batches; every epoch of a corpus visits each of its rows once.

    Rows of several corpora are numbered through, one corpus after the other. Each corpus is gone
    through epoch by epoch, in a new order each time; whose turn it is follows from the weights
    (see `proportions.py`): they are shares of the sequences dealt, not of the tokens.

    A batch holds `batch_sequences` sequences; or the next sequences as long as their tokens stay
    within `batch_tokens`, and one in any case. So a batch holds `batch_tokens` less at most one
    sequence, or a single longer sequence. With one corpus the last batch of an epoch holds what
    is left of it; with several, epochs end at different times and all batches are full.

    The state is the number of sequences dealt (and what it counts: seed, rows, weights), nothing
    of the cluster or of the batches: it loads at any world size and with batches of another size.

    Raises:
        CorpusError: nothing to sample, or a batch size or seed that makes no sense.
    """

    def __init__(
        self,
        streams: Sequence[Stream],
        seed: int,
        *,
        batch_sequences: int | None = None,
        batch_tokens: int | None = None,
        lengths: npt.NDArray[np.int32] | None = None,
    ) -> None:
        """`batch_tokens` needs the `lengths` of all rows; give it or `batch_sequences`."""
        if not streams or any(stream.trained < 1 for stream in streams):
            raise CorpusError("cannot sample from 0 rows")
        if any(stream.weight < 1 for stream in streams):
            raise CorpusError(f"weights must be 1 or more, not {[s.weight for s in streams]}")
        if (batch_sequences is None) == (batch_tokens is None) or (lengths is None) != (
            batch_tokens is None
        ):
            raise CorpusError("a batch is so many sequences, or so many tokens of known lengths")
        size, unit = (batch_sequences, "sequence") if lengths is None else (batch_tokens, "token")
        if size is None or size < 1:
            raise CorpusError(f"a batch needs at least 1 {unit}, not {size}")
        if seed < 0:
            raise CorpusError(f"the seed must be 0 or more, not {seed}")
        self.streams, self.seed, self.draws = tuple(streams), seed, 0
        self._size, self._lengths = size, lengths
        self._guess = 64  # sequences that a batch of so many tokens may hold
        self._first = np.cumsum([0, *(stream.rows for stream in streams)])[:-1]
        self._weights = [stream.weight for stream in streams]

    @property
    def epochs(self) -> tuple[int, ...]:
        """How often each corpus has been gone through."""
        dealt_ = dealt(self.draws, self._weights)
        return tuple(n // s.trained for n, s in zip(dealt_, self.streams, strict=True))

    def next(self) -> Rows:
        """(sequences,) row ids of the next global batch."""
        limit = MAX_DRAWS
        if len(self.streams) == 1:
            rows = self.streams[0].trained
            limit = rows - self.draws % rows
        if self._lengths is None:
            batch = self._deal(min(self._size, limit))
        else:
            batch = self._within_budget(self._lengths, limit)
        self.draws += len(batch)
        return batch

    def _within_budget(self, lengths: npt.NDArray[np.int32], limit: int) -> Rows:
        """The next rows, up to `limit`, that together have up to `batch_tokens`; at least one."""
        tried = min(self._guess, limit)
        while True:
            rows = self._deal(tried)
            tokens = np.cumsum(lengths[rows], dtype=np.int64)
            fit = int(np.searchsorted(tokens, self._size, side="right"))
            if fit < tried or tried == limit:
                self._guess = max(64, fit + fit // 4)
                return rows[: max(1, fit)]
            tried = min(2 * tried, limit)

    def _deal(self, count: int) -> Rows:
        """The row ids of the next `count` draws."""
        turns = np.arange(self.draws, self.draws + count, dtype=np.int64)
        owner, before = deal(turns, self._weights)
        rows = np.empty_like(turns)
        for i, stream in enumerate(self.streams):
            mine = owner == i
            epochs, positions = np.divmod(before[mine], stream.trained)
            for epoch in np.unique(epochs).tolist():
                now = epochs == epoch
                order = Permutation(stream.trained, self.seed, epoch, i)
                positions[now] = order(positions[now])
            rows[mine] = self._first[i] + stream.trained_rows(positions)
        return rows

    def state_dict(self) -> dict[str, Any]:
        """The cursor before the next batch, as plain integers."""
        corpora = {str(i): asdict(stream) for i, stream in enumerate(self.streams)}
        return {"seed": self.seed, "draws": self.draws, "corpora": corpora}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was saved.

        Raises:
            CorpusError: it was saved for other rows, weights or another seed, or is no cursor.
        """
        mine = self.state_dict()
        if set(state) != set(mine) or not isinstance(state["corpora"], Mapping):
            raise CorpusError(f"not a sampler state: it has the keys {sorted(state)}")
        saved, have = state["corpora"], mine["corpora"]
        if not all(isinstance(stream, Mapping) for stream in saved.values()):
            raise CorpusError(f"not a sampler state: its corpora are {dict(saved)!r:.60}")
        if saved.keys() != have.keys():
            raise CorpusError(
                f"the sampler was saved with {len(saved)} corpora and this run has {len(have)}; "
                f"{_REMEDY}"
            )
        for i, stream in have.items():
            if saved[i].get("corpus") != stream["corpus"]:
                raise CorpusError(
                    f"corpus {i} holds other data than when the sampler was saved (was it "
                    f"annotated again?); {_REMEDY}"
                )
        was, now = {"seed": state["seed"]}, {"seed": mine["seed"]}
        for i, stream in have.items():
            was |= {f"{name} of corpus {i}": number for name, number in saved[i].items()}
            now |= {f"{name} of corpus {i}": number for name, number in stream.items()}
        for name, number in now.items():
            if was.get(name) != number:
                raise CorpusError(
                    f"the sampler was saved with {name} {was.get(name)} and this run has {number}; "
                    f"{_REMEDY}"
                )
        draws = state["draws"]
        if type(draws) is not int or not 0 <= draws < MAX_DRAWS:
            raise CorpusError(f"the sampler state counts {draws!r} sequences dealt")
        self.draws = draws
