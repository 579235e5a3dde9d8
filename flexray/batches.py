"""What a run works through, in order: the batches it trains on, and between them held-out rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from flexray.config import TrainSection
from flexray.data_preparation import make_sampler
from flexray.datasets.mixture import Mixture
from flexray.datasets.sampler import Rows

_NONE: Rows = np.empty(0, np.int64)


@dataclass(frozen=True)
class Batch:
    """One global batch. The driver knows lengths and counts, never tokens.

    Attributes:
        step: the step it trains; of held-out rows, the step after which they are looked at.
        rows: row ids.
        lengths: tokens of each row.
        label_tokens: after the shift, over all rows.
        cursor: the sampler's state after this batch; empty for held-out rows.
        held_out: not to be trained on.
        ends_step: nothing more of this step follows, no validation either.
    """

    step: int
    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    label_tokens: int
    cursor: dict[str, Any] = field(default_factory=dict)
    held_out: bool = False
    ends_step: bool = True


def batches(
    documents: Mixture, train: TrainSection, *, done: int = 0, cursor: dict[str, Any] | None = None
) -> Iterator[Batch]:
    """The work of the steps after `done`, where the sampler stood at `cursor`.

    Raises CorpusError at once for a cursor of other data.
    """
    sampler = make_sampler(documents, train)
    if cursor is not None:
        sampler.load_state_dict(cursor)

    def deal() -> Iterator[Batch]:
        for step in range(done + 1, train.steps + 1):
            looks = step == train.steps or (
                train.validate_every and not step % train.validate_every
            )
            held_out = documents.validation_rows if looks else _NONE
            rows = sampler.next()
            cursor = sampler.state_dict()
            yield _batch(documents, step, rows, cursor=cursor, ends_step=not len(held_out))
            start = 0
            for stop in _stops(documents.lengths[held_out], train):
                ends = stop == len(held_out)
                part = held_out[start:stop]
                yield _batch(documents, step, part, held_out=True, ends_step=ends)
                start = stop

    return deal()


def _stops(lengths: npt.NDArray[np.int32], train: TrainSection) -> Iterator[int]:
    """Where rows of these lengths, (n,), are cut into parts of a batch's size."""
    if train.batch_sequences is not None:
        yield from range(train.batch_sequences, len(lengths), train.batch_sequences)
    if train.batch_tokens is not None:
        tokens = np.cumsum(lengths, dtype=np.int64)
        stop = 0
        while True:
            most = train.batch_tokens + (int(tokens[stop - 1]) if stop else 0)
            stop = max(stop + 1, int(np.searchsorted(tokens, most, side="right")))
            if stop >= len(lengths):
                break
            yield stop
    if len(lengths):
        yield len(lengths)


def _batch(documents: Mixture, step: int, rows: Rows, **keys: Any) -> Batch:
    return Batch(
        step=step,
        rows=tuple(rows.tolist()),
        lengths=tuple(documents.lengths[rows].tolist()),
        label_tokens=int(documents.label_tokens[rows].sum()),
        **keys,
    )
