"""What the driver sends a rank for one step, and what the rank reports back. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from flexray.solver.communicators import Change
from flexray.solver.plan import Plan


@dataclass(frozen=True)
class RankMicroStep:
    """One rank's part of a micro-step: its group, and the rows that the group shares."""

    ranks: tuple[int, ...]
    rows: tuple[int, ...]  # row ids of the corpus; none for a rank that idles


@dataclass(frozen=True)
class RankStep:
    """One rank's part of a step."""

    step: int
    generation: int
    label_tokens: int  # of the whole step, over all ranks
    micro_steps: tuple[RankMicroStep, ...]
    changes: tuple[Change, ...]  # communicators to make and drop first, the same list on every rank
    snapshot: bool = True  # whether the state after the step is copied to the rank's buddy


@dataclass(frozen=True)
class MicroReport:
    """What one rank measured in one micro-step. Counts are of the group's whole pack."""

    degree: int
    tokens: int
    squares: int  # sum of squared lengths
    sequences: int
    forward_ms: float
    backward_ms: float
    own_work_ms: float  # between parameter waits, without all_to_all_ms
    all_to_all_ms: float
    wait_ms: float  # the rest of forward and backward: parameters, slower groups


@dataclass(frozen=True)
class StepReport:
    """What one rank reports of one step. Loss and norm are of the whole step."""

    step: int
    generation: int
    rank: int
    loss: float  # mean over the step's label tokens
    gradient_norm: float  # before clipping
    learning_rate: float  # the schedule's, at this step
    skipped: bool  # the norm was not finite: no update was made
    micro_steps: tuple[MicroReport, ...]
    new_communicators: int
    step_ms: float
    snapshot_ms: float  # of step_ms: the copy to host memory, and the wait for the last one's way
    idle_ms: float  # between the end of the last step or evaluation here and the start of this one
    peak_memory_mb: float  # on a CPU the process's until now, else the step's
    tells_memory: bool  # it is the step's


@dataclass(frozen=True)
class EvaluationReport:
    """What one rank reports of a forward pass without training. The loss is of the whole work."""

    step: int
    generation: int
    rank: int
    loss: float  # mean over the work's label tokens; 0 without any
    label_tokens: int
    new_communicators: int
    wall_ms: float


def slices(
    plan: Plan,
    row_ids: tuple[int, ...],
    *,
    world: int,
    step: int,
    generation: int,
    label_tokens: int,
    changes: tuple[Change, ...],
    snapshot: bool = True,
) -> list[RankStep]:
    """Each rank's part, in rank order; `row_ids[i]` is row i of the plan's batch."""
    parts: list[list[RankMicroStep]] = [[] for _ in range(world)]
    for micro_step in plan.micro_steps:
        busy: dict[int, RankMicroStep] = {}
        for group in micro_step.groups:
            shared = RankMicroStep(group.ranks, tuple(row_ids[row] for row in group.rows))
            busy |= dict.fromkeys(group.ranks, shared)
        for rank, part in enumerate(parts):
            part.append(busy.get(rank, RankMicroStep((rank,), ())))
    return [
        RankStep(step, generation, label_tokens, tuple(part), changes, snapshot) for part in parts
    ]
