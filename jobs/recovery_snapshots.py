"""What the copies cost that make a step safe: step times with and without them, side by side."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from scipy.stats import trim_mean

from flexray.events import StepEvent
from flexray.jobs.recovery_run import Stopping, big_model, train

# Of four steps one is copied at its end and sent while the next runs; two have neither.
EVERY = 4
LENGTH = 32  # longer rows than elsewhere here: steps of a second and more


@dataclass(frozen=True)
class SnapshotCost:
    """Seconds a step: with a copy of each that is sent behind the next, and without."""

    with_s: float
    without_s: float
    periods: int

    @property
    def share(self) -> float:
        """0.03: steps take 3% longer with a copy of each."""
        return self.with_s / self.without_s - 1


def snapshot_cost(folder: Path, periods: int) -> SnapshotCost:
    """Trains for `periods` times four equal steps, after some that warm up."""
    clock = Clock((periods + 2) * EVERY)
    sections = big_model()
    sections["checkpoint"] = {"every": None, "copy_every": EVERY}
    sections["data"] |= {"max_length": LENGTH}
    train(folder, "snapshots", clock, sections)
    return cost_of(clock.ends[2 * EVERY - 2 :])


def cost_of(ends: Sequence[float]) -> SnapshotCost:
    """From the times at which steps ended, the first of them just before one that is copied."""
    each = [after - before for before, after in pairwise(ends)]
    periods = [each[i : i + EVERY] for i in range(0, len(each) - EVERY + 1, EVERY)]
    # The copy is a part of the first, the way to the buddy of the second: with a copy of each step
    # every one has both. Each period has its own quotient, so that a machine that is slow for a
    # while does not count.
    without_s = median(sum(p[2:]) / 2 for p in periods)
    share = trim_mean([2 * (sum(p[:2]) / sum(p[2:]) - 1) for p in periods], 0.1)
    return SnapshotCost(without_s * (1 + share), without_s, len(periods))


class Clock(Stopping):
    """When each step ended."""

    def __init__(self, steps: int) -> None:
        self.ends: list[float] = []
        self._steps = steps

    def on_step(self, event: StepEvent) -> None:
        """A step has ended on all ranks."""
        self.ends.append(time.monotonic())
        if event.step == self._steps:
            self.stop()
