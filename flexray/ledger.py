"""Which batches are dealt, done and committed; what a failure undoes is dealt again.

A batch goes through it once, whatever happens to the ranks: none is skipped and none is committed
twice. It knows neither Ray nor ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from flexray.actors.work import StepReport
from flexray.batches import Batch
from flexray.events import StepEvent
from flexray.prefetch import PlannedBatch


@dataclass(frozen=True)
class Done:
    """A step that every rank has made. Until it is committed a failure may undo it."""

    planned: PlannedBatch
    reports: Sequence[StepReport]
    event: StepEvent

    @property
    def batch(self) -> Batch:
        """What was trained on."""
        return self.planned.batch


class Ledger:
    """An iterator over batches, in order."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches = batches
        self._again: deque[Batch] = deque()
        self._dealt: deque[Batch] = deque()  # and not committed
        self._done: deque[Done] = deque()  # the first of them, those for validation left out
        self.committed: Batch | None = None  # the newest

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """The next batch: an undone one, or a new one."""
        batch = self._again.popleft() if self._again else next(self._batches)
        self._dealt.append(batch)
        return batch

    @property
    def newest_done(self) -> int | None:
        """The last step that is done, committed or not; None before the first one."""
        newest = self._done[-1].batch if self._done else self.committed
        return newest.step if newest else None

    @property
    def is_settled(self) -> bool:
        """Whether all that is done is committed."""
        return not self._done

    def done(self, step: Done) -> None:
        """The next step is done."""
        self._done.append(step)

    def commit(self, step: int) -> Iterator[Done]:
        """The steps up to `step` that were not committed yet, each committed when it is taken."""
        while self._done and self._done[0].batch.step <= step:
            done = self._done.popleft()
            self._forget(done.batch)
            self.committed = done.batch
            yield done

    def looked_at(self, last: Batch) -> None:
        """The validation whose last batch this is, is written down."""
        # One without any label token commits nothing: it goes with the next step that is.
        if not any(done.batch.step <= last.step for done in self._done):
            self._forget(last)

    def rewind(self) -> Self:
        """Deals everything again that is not committed."""
        self._done.clear()
        self._again.extendleft(reversed(self._dealt))
        self._dealt.clear()
        return self

    def _forget(self, through: Batch) -> None:
        while self._dealt.popleft() is not through:
            pass
