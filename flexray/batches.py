"""What a run works through, in order: the batches it trains on, and between them held-out rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from flexray.config import TrainSection
from flexray.data_preparation import make_sampler
from flexray.datasets.mixture import Mixture


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
    held_out = list(_parts(documents, train))

    def deal() -> Iterator[Batch]:
        for step in range(done + 1, train.steps + 1):
            looks = step == train.steps or (
                train.validate_every and not step % train.validate_every
            )
            parts = held_out if looks else []
            rows = sampler.next().tolist()
            cursor = sampler.state_dict()
            yield _batch(documents, step, rows, cursor=cursor, ends_step=not parts)
            for i, part in enumerate(parts, 1):
                yield _batch(documents, step, part, held_out=True, ends_step=i == len(parts))

    return deal()


def _parts(documents: Mixture, train: TrainSection) -> Iterator[list[int]]:
    """The held-out rows in parts of a batch's size."""
    part: list[int] = []
    tokens = 0
    for row in documents.validation_rows.tolist():
        length = int(documents.lengths[row])
        over = train.batch_tokens is not None and tokens + length > train.batch_tokens
        if part and (over or len(part) == train.batch_sequences):
            yield part
            part, tokens = [], 0
        part.append(row)
        tokens += length
    if part:
        yield part


def _batch(documents: Mixture, step: int, rows: list[int], **keys: Any) -> Batch:
    return Batch(
        step=step,
        rows=tuple(rows),
        lengths=tuple(documents.lengths[rows].tolist()),
        label_tokens=int(documents.label_tokens[rows].sum()),
        **keys,
    )
