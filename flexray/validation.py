"""The loss on held-out rows: the mean over all their label tokens, in whatever batches."""

from __future__ import annotations

from collections.abc import Sequence

from flexray.actors.work import EvaluationReport
from flexray.batches import Batch
from flexray.events import ValidationEvent


class ValidationSum:
    """Adds up the batches of one validation."""

    def __init__(self) -> None:
        self._loss = self._seconds = 0.0
        self._label_tokens = self._sequences = 0

    def add(self, batch: Batch, reports: Sequence[EvaluationReport]) -> None:
        """One batch with its reports; none where it has no label token."""
        self._sequences += len(batch.rows)
        self._label_tokens += batch.label_tokens
        if reports:
            self._loss += reports[0].loss * batch.label_tokens
            self._seconds += max(report.wall_ms for report in reports) / 1e3

    def event(self, step: int) -> ValidationEvent:
        """What is written down of it."""
        return ValidationEvent(
            step=step,
            loss=self._loss / max(1, self._label_tokens),
            sequences=self._sequences,
            label_tokens=self._label_tokens,
            validation_s=self._seconds,
        )
