"""What hundreds of generations leave behind in the processes that live through all of them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil

from flexray.events import GenerationEvent, StepEvent
from flexray.jobs.recovery_run import Stopping, train
from flexray.jobs.training_corpora import Rows, write_corpus

SMALL, LARGE = 2, 3
# A small corpus: pages of it that were read are resident too, and are soon all read.
LONGEST = 64
SETTLED = 3  # steps of a generation after which it is looked at
FIRST = 20  # generations in which a process may still grow
WINDOW = 5  # looks whose median is taken


@dataclass(frozen=True)
class Look:
    """At one process, in one generation."""

    generation: int
    pid: int
    descriptors: int
    threads: int
    resident_mb: float


@dataclass(frozen=True)
class Growth:
    """Of a survivor, the larger of its two processes': after 20 generations, and at the end."""

    what: str
    early: float
    late: float

    @property
    def share(self) -> float:
        """0.05: 5% more."""
        return (self.late - self.early) / self.early


def count_generations(folder: Path, generations: int) -> tuple[int, list[Growth]]:
    """Trains a tiny model through so many generations. Returns how many, and how survivors grew.

    In turn, a third rank is killed, replaced, scaled away and asked for again.
    """
    corpus = write_corpus("github", folder / "generations-corpus", Rows(24, LONGEST))
    watcher = Watcher(generations)
    train(
        folder,
        "generations",
        watcher,
        {
            "cluster": {"gpus": LARGE, "min_gpus": SMALL, "device": "cpu"},
            "data": {"corpus": str(corpus), "max_length": LONGEST},
            "train": {"batch_sequences": 4},
        },
    )
    return watcher.generation, growth(watcher.looks)


def growth(looks: Sequence[Look]) -> list[Growth]:
    """Of those processes that were there at the first look and at the last, the worst of each."""
    survivors = {look.pid for look in looks if look.generation == looks[-1].generation}
    survivors &= {look.pid for look in looks if look.generation == looks[0].generation}
    found = []
    for what in ("descriptors", "threads", "resident_mb"):
        each = []
        for pid in survivors:
            own = [look for look in looks if look.pid == pid]
            early = [getattr(look, what) for look in own if look.generation >= FIRST][:WINDOW]
            late = [getattr(look, what) for look in own][-WINDOW:]
            each.append(Growth(what, median(early), median(late)))
        found.append(max(each, key=lambda one: one.share))
    return found


class Watcher(Stopping):
    """Makes one generation after another, and looks at the processes of every small one."""

    def __init__(self, generations: int) -> None:
        self.looks: list[Look] = []
        self.generation = 0
        self._wanted = generations
        self._steps = 0
        self._pids: list[int] = []
        self._kills = True

    def on_generation(self, event: GenerationEvent) -> None:
        """Who there is."""
        self.generation, self._pids, self._steps = event.generation, list(event.pids), 0

    def on_step(self, event: StepEvent) -> None:
        """Looks, and makes the next generation."""
        self._steps += 1
        if self._steps < SETTLED:
            return
        if self._steps > SETTLED:  # a third rank is on its way, and needs the cores
            time.sleep(0.1)
        elif len(self._pids) == SMALL:
            self.looks += [_look(self.generation, pid) for pid in self._pids]
            if self.generation >= self._wanted:
                self.stop()
            else:
                self.trainer.scale(LARGE)
        elif self._kills:
            self._kills = False
            os.kill(self._pids[-1], signal.SIGKILL)
        else:
            self._kills = True
            self.trainer.scale(SMALL)


def _look(generation: int, pid: int) -> Look:
    process = psutil.Process(pid)
    return Look(
        generation=generation,
        pid=pid,
        descriptors=process.num_fds(),
        threads=process.num_threads(),
        resident_mb=process.memory_info().rss / 2**20,
    )
