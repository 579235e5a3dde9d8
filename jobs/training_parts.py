"""The parts of the benchmark of training: what is run, and what comes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from flexray.jobs.training_corpora import Rows, write_corpus
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
from flexray.jobs.wrong_costs import wrong
from flexray.solver.cost import CostModel

WAYS = (FLEXRAY, STATIC, ADAPTIVE)
PINNED, EMULATED = 2, (4, 8)  # ranks

# Changes to the small Llama: heads for degrees up to 8; where compute is slept, a model that
# exchanges more, of little compute.
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8}
SMALL: dict[str, Any] = HEADS
SLEPT: dict[str, Any] = HEADS | {"hidden_size": 320, "intermediate_size": 16}
ROWS = Rows(128, 1536)
# Steps of a second and more: planning, on the same cores, is not to be seen in their time.
BATCH_TOKENS = {PINNED: 49_152, 4: 24_576, 8: 49_152}

SLOW_RANKS, SLOW_RANK = 4, 2
SPEED = 3.5  # of four ranks, one of them half as fast
FOUND = 0.6  # a plan knows of it that takes its speed to be no more
LEARNING = 10  # steps that it may take

WRONG = 3.0  # times what is right, or a third of it
CONVERGING = 20  # steps until the model is to be right again


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
class Converged:
    """Real steps from a cost model that is three times wrong.

    `before`, `after`: how far planned times are from what was measured, the mean over the first
    CONVERGING steps and over those that follow, as a share of what was measured.
    """

    before: float
    after: float
    steps: int  # that follow


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


def measured_cost(folder: Path, size: Size) -> CostModel:
    """What the model of which compute is slept takes on two ranks with a core each.

    Without the all-to-alls: these are made.
    """
    sections = sections_of(PINNED, "github", folder / "measured-corpus", SLEPT)
    turns = [Turn(batch, FLEXRAY) for batch in range(size.warm + size.measured)]
    cost = train(folder, "measured", sections, turns, pinned()).cost
    return CostModel(cost.quadratic, cost.linear, cost.per_sequence, cost.micro_step_ms)


def converge(folder: Path, right: CostModel, size: Size) -> Converged:
    """Two ranks with a core each, from a cost model that is WRONG. `right`: what it is."""
    sections = sections_of(PINNED, "github", folder / "converge-corpus", SMALL)
    turns = [Turn(batch, FLEXRAY) for batch in range(CONVERGING + size.measured)]
    run = train(folder, "converge", sections, turns, pinned(), wrong(right, WRONG))
    before, after = run.steps[:CONVERGING], run.steps[CONVERGING:]
    return Converged(off_plan(before), off_plan(after), size.measured)


def compare(
    folder: Path, corpus: str, ranks: int, size: Size, slept: CostModel | None = None
) -> Compared:
    """The ways on one corpus: two ranks with a core each, or more, whose compute is `slept`.

    A rank holds so much that the longest sequence needs all of them.
    """
    worker = emulated(Emulation(slept)) if slept else pinned()
    model, name = SLEPT if slept else SMALL, f"{corpus}-{ranks}"
    sections = sections_of(ranks, corpus, folder / f"{name}-corpus", model)
    run = train(folder, name, sections, in_turns(size, WAYS), worker)
    return compared(corpus, ranks, slept is not None, run, size)


def slow_rank(folder: Path, size: Size, slept: CostModel) -> SlowRank:
    """Four emulated ranks; one becomes half as fast.

    A rank holds half of the longest sequence, so that none needs all of them.
    """
    slowed = Emulation(slept, SLOW_RANK, size.warm + size.measured + 1)
    sections = sections_of(SLOW_RANKS, "github", folder / "slow-rank-corpus", SLEPT)
    sections["planner"] = {"capacity": ROWS.longest // 2}
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
        off=off_plan(of[FLEXRAY]),
        cost=run.cost,
    )


def off_plan(steps: Sequence[Step]) -> float:
    """How far planned times are from those taken, as a share of these: the mean over the steps."""
    return mean(abs(step.planned_s / step.wall_s - 1) for step in steps)


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


def sections_of(ranks: int, corpus: str, folder: Path, model: dict[str, Any]) -> dict[str, Any]:
    """The run's config; its corpus is written to `folder`.

    A rank holds so many tokens that the longest sequence needs all ranks. `model`: changes to the
    small Llama.
    """
    return {
        "cluster": {"gpus": ranks, "device": "cpu"},
        "model": {"config": model},
        "data": {"corpus": str(write_corpus(corpus, folder, ROWS)), "max_length": ROWS.longest},
        "train": {"batch_tokens": BATCH_TOKENS[ranks]},
        "planner": {"capacity": ROWS.longest // ranks},
    }
