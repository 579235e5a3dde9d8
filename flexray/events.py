"""What a run writes down: `events.jsonl` and `plans.jsonl`. docs/events.md is the schema.

Usage:
    with EventLog(run.events_path) as events:
        events.write(StepEvent(step=1, loss=5.5, ...))
    for event in read_json_lines(run.events_path): ...
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from flexray.json_lines import JsonLinesWriter
from flexray.solver.plan import Plan

Cause = Literal["start", "scale", "drain", "death", "hang", "memory"]


@dataclass(frozen=True, kw_only=True)
class StepEvent:
    """One step. Times are seconds, counts are of the whole step over all ranks."""

    kind: ClassVar[str] = "step"

    step: int
    loss: float
    tokens: int
    label_tokens: int
    rows: Sequence[int]
    step_s: float
    planned_s: float
    plan_wait_s: float
    solve_s: float
    lower_bound_s: float
    groups: Sequence[Sequence[int]]
    generation: int
    learning_rate: float
    skipped: bool
    model_version: int
    idle: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class ValidationEvent:
    """Held-out rows were looked at after `step`; the loss is the mean over all label tokens."""

    kind: ClassVar[str] = "validation"

    step: int
    loss: float
    sequences: int
    label_tokens: int
    validation_s: float


@dataclass(frozen=True, kw_only=True)
class CheckpointEvent:
    """The checkpoint of `step` is whole on disk."""

    kind: ClassVar[str] = "checkpoint"

    step: int
    location: str
    blocked_s: float
    write_s: float


@dataclass(frozen=True, kw_only=True)
class ModelEvent:
    """The cost model that the plan of `step` was made with, where it is another than before."""

    kind: ClassVar[str] = "model"

    step: int
    version: int
    coefficients: dict[str, Any]
    errors: dict[str, float]
    speeds: dict[str, float]
    step_ms: float


@dataclass(frozen=True, kw_only=True)
class ReplanEvent:
    """The plan of `step` was made again, since the cost model had moved meanwhile."""

    kind: ClassVar[str] = "replan"

    step: int
    planned_s: float
    moved_s: float
    version: int


@dataclass(frozen=True, kw_only=True)
class ResumeEvent:
    """The run goes on from a checkpoint; what came after it was cut off this file."""

    kind: ClassVar[str] = "resume"

    location: str
    at_step: int
    lost_steps: int


@dataclass(frozen=True, kw_only=True)
class GenerationEvent:
    """One membership: which actors, in which rank order, and why it was made."""

    kind: ClassVar[str] = "generation"

    generation: int
    world: int
    pids: Sequence[int]
    nodes: Sequence[str]
    cause: Cause
    pause_s: float
    at_step: int
    steps_again: int
    form_s: float
    build_s: float
    restore_s: float
    moved_mb: float
    copies_mb: float


@dataclass(frozen=True, kw_only=True)
class DataEvent:
    """What of the corpus is trained on: nothing is dropped, cut or split in silence."""

    kind: ClassVar[str] = "data"

    corpus: str
    over_length: str
    max_length: int
    rows: int
    zero_length_rows: int
    dropped_rows: int
    truncated_rows: int
    split_rows: int
    pieces: int
    lost_tokens: int
    lost_label_tokens: int


Event = (
    StepEvent
    | ValidationEvent
    | CheckpointEvent
    | GenerationEvent
    | ModelEvent
    | ReplanEvent
    | ResumeEvent
    | DataEvent
)


class EventLog(JsonLinesWriter):
    """The writer of `events.jsonl`."""

    def write(self, event: Event) -> None:
        """Append the event with its kind and the time (seconds since 1970, UTC)."""
        self.append({"kind": event.kind, "time": time.time()} | vars(event))


class PlanLog(JsonLinesWriter):
    """The writer of `plans.jsonl`."""

    def write(self, step: int, generation: int, plan: Plan) -> None:
        """Append the plan of one step; `rows` in it are positions in the step's batch."""
        self.append({"step": step, "generation": generation} | plan.to_dict())
