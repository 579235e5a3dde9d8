"""The parts of the benchmark of training: what is run, and what comes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from flexray.jobs.training_corpora import write_corpus
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
from flexray.presets import load_preset
from flexray.solver.cost import CostModel

WAYS = (FLEXRAY, STATIC, ADAPTIVE)
PINNED, EMULATED = 2, (4, 8)  # ranks

# Changes to the small Llama. Where compute is slept, with the all-to-alls of what is slept (the CPU
# preset: 0.02 MB a token), and heads for degrees up to 8.
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8}
SMALL: dict[str, Any] = HEADS
SLEPT: dict[str, Any] = HEADS | {"num_hidden_layers": 4, "hidden_size": 160}
LONGEST = {PINNED: 4096, 4: 8192, 8: 8192}
BATCH_TOKENS = {PINNED: 16_384, 4: 32_768, 8: 65_536}

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
    cost: CostModel  # as the run's own reports tell it

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


def compare(folder: Path, corpus: str, ranks: int, size: Size) -> Compared:
    """The ways on one corpus: two ranks with a core each, or more, whose compute is slept.

    A rank holds so much that the longest sequence needs all of them.
    """
    is_emulated = ranks != PINNED
    worker = emulated(Emulation(stated_cost())) if is_emulated else pinned()
    where = write_corpus(corpus, folder / f"{corpus}-{ranks}-corpus", LONGEST[ranks])
    sections = sections_of(ranks, where, LONGEST[ranks] // ranks)
    run = train(folder, f"{corpus}-{ranks}", sections, in_turns(size, WAYS), worker)
    return compared(corpus, ranks, is_emulated, run, size)


def slow_rank(folder: Path, size: Size) -> SlowRank:
    """Four emulated ranks; one becomes half as fast.

    A rank holds half of the longest sequence, so that none needs all of them.
    """
    slowed = Emulation(stated_cost(), SLOW_RANK, size.warm + size.measured + 1)
    where = write_corpus("github", folder / "slow-rank-corpus", LONGEST[SLOW_RANKS])
    sections = sections_of(SLOW_RANKS, where, LONGEST[SLOW_RANKS] // 2)
    run = train(folder, "slow-rank", sections, slow_turns(size), emulated(slowed))
    return slowness(run.steps, size)


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


def compared(corpus: str, ranks: int, is_emulated: bool, run: Run, size: Size) -> Compared:
    """The steps after those that warm up."""
    steps = [step for step in run.steps if step.turn.batch >= size.warm]
    of = {way: [step for step in steps if step.turn.way == way] for way in WAYS}
    return Compared(
        corpus=corpus,
        ranks=ranks,
        is_emulated=is_emulated,
        batches=size.measured,
        taken_s={way: mean(s.wall_s for s in each) for way, each in of.items()},
        planned_s={way: mean(s.planned_s for s in each) for way, each in of.items()},
        off=mean(abs(step.planned_s / step.wall_s - 1) for step in of[FLEXRAY]),
        cost=run.cost,
    )


def slowness(steps: Sequence[Step], size: Size) -> SlowRank:
    """From the steps of `slow_turns`."""
    first = size.warm + size.measured
    slow, last = steps[first:], steps[first + LEARNING :]
    found = (n for n, step in enumerate(slow) if step.speeds[SLOW_RANK] <= FOUND)
    return SlowRank(
        healthy_s=mean(step.wall_s for step in steps[size.warm : first]),
        aware_s=mean(step.wall_s for step in last if step.turn.way == FLEXRAY),
        unaware_s=mean(step.wall_s for step in last if step.turn.way == UNAWARE),
        found=next(found, None),
        batches=size.measured,
    )


def sections_of(ranks: int, corpus: Path, capacity: int) -> dict[str, Any]:
    """The run's config: `capacity` tokens on a rank."""
    return {
        "cluster": {"gpus": ranks, "device": "cpu"},
        "model": {"config": SMALL if ranks == PINNED else SLEPT},
        "data": {"corpus": str(corpus), "max_length": LONGEST[ranks]},
        "train": {"batch_tokens": BATCH_TOKENS[ranks]},
        "planner": {"capacity": capacity},
    }


def stated_cost() -> CostModel:
    """What is slept: the CPU preset's compute and parameter collectives. All-to-alls are made."""
    cost = load_preset("cpu").cost
    return CostModel(cost.quadratic, cost.linear, cost.per_sequence, cost.micro_step_ms)
