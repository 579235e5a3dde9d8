"""The parts of the benchmark of training: what is run, and what comes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from flexray.jobs.training_emulation import Emulation, emulated, pinned
from flexray.jobs.training_turns import (
    ADAPTIVE,
    FLEXRAY,
    STATIC,
    UNAWARE,
    Run,
    Step,
    Turn,
    train,
)
from flexray.solver.cost import CostModel

WAYS = (FLEXRAY, STATIC, ADAPTIVE)
PINNED, EMULATED = 2, (4, 8)  # ranks

# 100K parameters; tokens are bytes. Eight heads for degrees up to 8.
MODEL: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 8}
LONGEST = {PINNED: 3072, 4: 8192, 8: 8192}
SEQUENCES = {PINNED: 24, 4: 48, 8: 96}

SLOW_RANKS, SLOW_RANK = 4, 2
SPEED = 3.5  # of four ranks, one of them half as fast
FOUND = 0.6  # a plan knows of it that takes its speed to be no more
LEARNING = 10  # steps that it may take


@dataclass(frozen=True)
class Size:
    """How many batches warm up, how many are measured."""

    warm: int
    measured: int


@dataclass(frozen=True)
class Compared:
    """The ways side by side, on one corpus and so many ranks. Seconds a step, means.

    `off`: of FlexRay's steps, how far the time that was planned is from that it took: the mean
    over steps, as a share of what it took.
    """

    corpus: str
    ranks: int
    is_emulated: bool
    batches: int
    taken_s: dict[str, float]
    planned_s: dict[str, float]
    off: float

    def speedup(self, way: str) -> float:
        """Of FlexRay's plans over those of `way`, measured."""
        return self.taken_s[way] / self.taken_s[FLEXRAY]

    def planned_speedup(self, way: str) -> float:
        """The same as the plans say."""
        return self.planned_s[way] / self.planned_s[FLEXRAY]


@dataclass(frozen=True)
class SlowRank:
    """One of four ranks half as fast, emulated. Seconds a step, means over the same batches.

    `found`: steps from the first slow one to the first that is planned with it; None: never.
    """

    healthy_s: float
    aware_s: float
    unaware_s: float
    found: int | None
    batches: int

    @property
    def best_s(self) -> float:
        """The healthy time with as much less speed."""
        return self.healthy_s * SLOW_RANKS / SPEED

    @property
    def over_best(self) -> float:
        """0.1: steps take 10% longer than that."""
        return self.aware_s / self.best_s - 1


def compare_pinned(folder: Path, corpora: dict[str, str], size: Size) -> tuple[list[Compared], Run]:
    """Two ranks with a core each and real compute; also the last run, for its cost model."""
    found = []
    for corpus, where in corpora.items():
        sections = sections_of(PINNED, where, LONGEST[PINNED] // PINNED)
        run = train(folder, f"pinned-{corpus}", sections, in_turns(size, WAYS), pinned())
        found.append(compared(corpus, PINNED, False, run.steps, size))
    return found, run


def compare_emulated(
    folder: Path, corpora: dict[str, str], ranks: int, emulation: Emulation, size: Size
) -> list[Compared]:
    """More ranks than cores: compute is slept."""
    found = []
    for corpus, where in corpora.items():
        sections = sections_of(ranks, where, LONGEST[ranks] // ranks)
        turns = in_turns(size, WAYS)
        run = train(folder, f"emulated-{ranks}-{corpus}", sections, turns, emulated(emulation))
        found.append(compared(corpus, ranks, True, run.steps, size))
    return found


def slow_rank(folder: Path, where: str, emulation: Emulation, size: Size) -> SlowRank:
    """Four emulated ranks; one becomes half as fast.

    A rank holds half of the longest sequence, so that none needs all of them.
    """
    first = size.warm + size.measured
    turns = slow_turns(size)
    slowed = replace(emulation, slow_rank=SLOW_RANK, slow_from=first + 1)
    sections = sections_of(SLOW_RANKS, where, LONGEST[SLOW_RANKS] // 2)
    return slowness(train(folder, "slow-rank", sections, turns, emulated(slowed)).steps, size)


def in_turns(size: Size, ways: Sequence[str]) -> list[Turn]:
    """Every batch once each way; who comes first changes, as a step's plan runs beside another."""
    turns = []
    for batch in range(size.warm + size.measured):
        first = batch % len(ways)
        turns += [Turn(batch, way) for way in (*ways[first:], *ways[:first])]
    return turns


def slow_turns(size: Size) -> list[Turn]:
    """Batches on healthy ranks, steps to learn from, and the same batches both ways."""
    first = size.warm + size.measured
    healthy = [Turn(batch, FLEXRAY) for batch in range(first)]
    learning = [Turn(batch, FLEXRAY) for batch in range(first, first + LEARNING)]
    both = [Turn(batch, way) for batch in range(size.warm, first) for way in (FLEXRAY, UNAWARE)]
    return [*healthy, *learning, *both]


def compared(
    corpus: str, ranks: int, is_emulated: bool, steps: Sequence[Step], size: Size
) -> Compared:
    """The steps after those that warm up."""
    of = {
        way: [s for s in steps if s.turn.way == way and s.turn.batch >= size.warm] for way in WAYS
    }
    return Compared(
        corpus=corpus,
        ranks=ranks,
        is_emulated=is_emulated,
        batches=size.measured,
        taken_s={way: mean(s.wall_s for s in each) for way, each in of.items()},
        planned_s={way: mean(s.planned_s for s in each) for way, each in of.items()},
        off=mean(abs(s.planned_s / s.wall_s - 1) for s in of[FLEXRAY]),
    )


def slowness(steps: Sequence[Step], size: Size) -> SlowRank:
    """From the steps of `slow_turns`."""
    first = size.warm + size.measured
    slow, last = steps[first:], steps[first + LEARNING :]
    aware = [step for step in slow if step.turn.way == FLEXRAY]
    found = (n for n, step in enumerate(aware) if step.speeds[SLOW_RANK] <= FOUND)
    return SlowRank(
        healthy_s=mean(step.wall_s for step in steps[size.warm : first]),
        aware_s=mean(step.wall_s for step in last if step.turn.way == FLEXRAY),
        unaware_s=mean(step.wall_s for step in last if step.turn.way == UNAWARE),
        found=next(found, None),
        batches=size.measured,
    )


def sections_of(ranks: int, corpus: str, capacity: int) -> dict[str, Any]:
    """The run's config: `capacity` tokens on a rank."""
    return {
        "cluster": {"gpus": ranks, "device": "cpu"},
        "model": {"config": MODEL},
        "data": {"corpus": corpus, "max_length": LONGEST[ranks], "over_length": "drop"},
        "train": {"batch_sequences": SEQUENCES[ranks]},
        "planner": {"capacity": capacity},
    }


def emulation_of(run: Run) -> Emulation:
    """Sleeps what a step of `run` took, by its own fit."""
    return Emulation(compute_only(run.cost), run.step_ms)


def compute_only(cost: CostModel) -> CostModel:
    """What is slept of a cost model: all-to-alls are made."""
    return CostModel(cost.quadratic, cost.linear, cost.per_sequence, cost.micro_step_ms)
