"""The mean over all label tokens, not over batches."""

from __future__ import annotations

import dataclasses

from flexray.actors.work import EvaluationReport
from flexray.batches import Batch
from flexray.events import ValidationEvent
from flexray.validation import ValidationSum


def reports(loss, label_tokens, *wall_ms):
    first = EvaluationReport(7, 1, 0, loss, label_tokens, 0, 0.0)
    return [dataclasses.replace(first, rank=i, wall_ms=ms) for i, ms in enumerate(wall_ms)]


def batch(rows, label_tokens):
    return Batch(7, tuple(range(rows)), (9,) * rows, label_tokens, held_out=True)


def test_every_label_token_counts_the_same():
    total = ValidationSum()
    total.add(batch(2, 10), reports(2.0, 10, 100.0, 300.0))
    total.add(batch(1, 30), reports(5.0, 30, 200.0, 50.0))
    total.add(batch(3, 0), [])  # nothing to predict: no rank was sent it
    assert total.event(7) == ValidationEvent(
        step=7, loss=4.25, sequences=6, label_tokens=40, validation_s=0.5
    )
    assert ValidationSum().event(1).loss == 0
