"""Tables of the benchmark of recovery, and what was to be reached."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from flexray.jobs.recovery_flexray import Recoveries
from flexray.jobs.recovery_generations import FIRST, Growth
from flexray.jobs.recovery_model import LENGTH, PARAMETERS, RANKS, SEQUENCES
from flexray.jobs.recovery_ray_train import CHECKPOINT_EVERY, Restart
from flexray.jobs.recovery_snapshots import SnapshotCost
from flexray.jobs.tables import Row, section

WHAT = {
    "descriptors": "file descriptors",
    "threads": "threads",
    "resident_mb": "resident memory, MB",
}


@dataclass(frozen=True)
class Goal:
    """A figure and the most that it may be."""

    name: str
    value: float
    most: float
    unit: str  # "s", "%" or "steps"

    @property
    def is_reached(self) -> bool:
        """Whether it is no more."""
        return self.value <= self.most

    def __str__(self) -> str:
        value, most = (_in(figure, self.unit) for figure in (self.value, self.most))
        return f"{self.name}: {value}, at most {most}"


@dataclass(frozen=True)
class Figures:
    """All that was measured. `load`: of the machine in the minute before each part began."""

    flexray: Recoveries
    ray_train: Sequence[Restart]
    snapshots: SnapshotCost
    generations: int
    growth: Sequence[Growth]
    load: Sequence[float]


def goals(figures: Figures) -> list[Goal]:
    """What FlexRay was to reach, with what it did."""
    each = figures.flexray.each
    totals = [one.total_s for one in each]
    return [
        Goal("recovery, median", median(totals), 2.0, "s"),
        Goal("recovery, worst", max(totals), 5.0, "s"),
        Goal("committed steps lost", figures.flexray.lost_steps, 0, "steps"),
        Goal("steps made again, most", max(one.steps_again for one in each), 2, "steps"),
        Goal("survivors with a new process", sum(not one.kept for one in each), 0, "SIGKILLs"),
        Goal("pause for a join, worst", max(one.join_s for one in each), 2.0, "s"),
        Goal("cost of snapshots", figures.snapshots.share, 0.03, "%"),
        *(
            Goal(f"growth of {WHAT[one.what]} from generation {FIRST} on", one.share, 0.05, "%")
            for one in figures.growth
        ),
    ]


def report(figures: Figures) -> str:
    """Everything as Markdown."""
    load = ", ".join(f"{load:.1f}" for load in figures.load)
    return "\n".join(
        [
            f"*{platform.machine()}, {os.cpu_count()} cores, gloo; load of the machine in the "
            f"minute before each part: {load}.*",
            "",
            section("One SIGKILL, both systems", _both(figures)),
            section("FlexRay: where the time goes", _parts(figures)),
            section("Ray Train v2: where the time goes", _ray_train_parts(figures.ray_train)),
            section("A copy of the state after every step", _snapshots(figures.snapshots)),
            section(f"{figures.generations} generations", _growth(figures)),
            section("Goals", _goals(figures)),
        ]
    )


def _in(figure: float, unit: str) -> str:
    if unit == "%":
        return f"{figure:.1%}"
    return f"{figure:.2f} s" if unit == "s" else f"{figure:.0f} {unit}"


def _seconds(times: Sequence[float]) -> str:
    return f"{median(times):.2f}, {max(times):.2f}"


def _both(figures: Figures) -> Iterator[Row]:
    ours, theirs = figures.flexray.each, figures.ray_train
    lost = [one.lost_steps for one in theirs]
    kept = sum(one.kept for one in ours)
    theirs_kept = sum(one.kept == RANKS - 1 for one in theirs)
    yield (
        f"{PARAMETERS / 1e6:.1f}M parameters, {RANKS} ranks, {SEQUENCES} x {LENGTH} tokens a step",
        "FlexRay",
        f"Ray Train v2, elastic, a checkpoint every {CHECKPOINT_EVERY} steps",
    )
    yield "SIGKILLs", str(len(ours)), str(len(theirs))
    yield (
        "s from SIGKILL to the first step done for good, less steps made meanwhile: median, worst",
        _seconds([one.total_s for one in ours]),
        _seconds([one.total_s for one in theirs]),
    )
    yield (
        "the same with the next, new step, whose end makes it so",
        _seconds([one.total_s + one.commit_s for one in ours]),
        "-",
    )
    yield (
        "steps done and lost: median, most",
        f"{figures.flexray.lost_steps} in all",
        f"{median(lost):.0f}, {max(lost)}",
    )
    yield (
        "s to make these again: median, worst",
        "0",
        _seconds([one.again_s for one in theirs]),
    )
    yield (
        "steps under way that are made again: most",
        str(max(one.steps_again for one in ours)),
        "-",
    )
    yield (
        "survivors keep their processes",
        f"{kept} of {len(ours)} times",
        f"{theirs_kept} of {len(theirs)} times",
    )
    yield (
        "s of pause when the replacement joins: median, worst",
        _seconds([one.join_s for one in ours]),
        "in the above: all workers start anew",
    )


def _parts(figures: Figures) -> Iterator[Row]:
    each = figures.flexray.each
    yield "part", "s: median, worst"
    yield "detection: SIGKILL to the news of it", _seconds([one.detection_s for one in each])
    yield (
        "the survivors leave the old world, and agree on the new",
        _seconds([one.leaving_s for one in each]),
    )
    yield "re-forming: connections, and the model", _seconds([one.forming_s for one in each])
    yield (
        "re-shard: state fetched, checked, and copied to buddies",
        _seconds([one.reshard_s for one in each]),
    )
    yield "planning: ranks wait for the first plan", _seconds([one.planning_s for one in each])
    yield "the rest", _seconds([one.rest_s for one in each])


def _ray_train_parts(each: Sequence[Restart]) -> Iterator[Row]:
    yield "part", "s: median, worst"
    yield (
        "detection, and new workers up to the training function",
        _seconds([one.restart_s for one in each]),
    )
    yield "the model is built, the checkpoint loaded", _seconds([one.load_s for one in each])
    yield "the rest", _seconds([one.rest_s for one in each])


def _snapshots(cost: SnapshotCost) -> Iterator[Row]:
    yield "step without", "step with", "cost", "pairs of steps"
    yield (
        f"{cost.without_s:.3f} s",
        f"{cost.with_s:.3f} s",
        f"{cost.share:.1%}",
        str(cost.periods),
    )


def _growth(figures: Figures) -> Iterator[Row]:
    yield "of the survivor that grew most", f"after {FIRST}", "in the end", "growth"
    for one in figures.growth:
        yield WHAT[one.what], f"{one.early:.0f}", f"{one.late:.0f}", f"{one.share:.1%}"


def _goals(figures: Figures) -> Iterator[Row]:
    yield "goal", "measured", "at most", ""
    for goal in goals(figures):
        yield (
            goal.name,
            _in(goal.value, goal.unit),
            _in(goal.most, goal.unit),
            "reached" if goal.is_reached else "**missed**",
        )
