"""FlexRay under SIGKILL: one of four actors at a random moment of a step, again and again.

Every figure comes from the run's own `events.jsonl` (docs/events.md) and the clock of the kill.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from flexray.events import GenerationEvent, StepEvent
from flexray.jobs.recovery_model import RANKS
from flexray.jobs.recovery_run import Stopping, big_model, train
from flexray.json_lines import read_json_lines

SETTLED = 4  # steps of four ranks between a join and the next SIGKILL
Event = dict[str, Any]


@dataclass(frozen=True)
class Kill:
    """A SIGKILL: `time` in seconds since 1970, the pids that were members then."""

    time: float
    pid: int
    pids: tuple[int, ...]


@dataclass(frozen=True)
class Recovery:
    """What one SIGKILL took. Times are seconds.

    Attributes:
        detection_s: to the news of it, where the pause begins.
        pause_s: from there until the new world is formed.
        forming_s: of that, the slowest rank's: ranks meet and connect, the model is built.
        reshard_s: likewise: the training state is fetched, checked, and copied to the buddies.
        planning_s: the ranks waited for the first plan.
        rest_s: what is left to the first committed step, less the steps that are made until then.
        steps_again: that had begun and are made again.
        commit_s: of the step after the first, whose end commits the first; 0 if it is made again.
        kept: every survivor has the process that it had.
        join_s: how long training stood still for the replacement.
    """

    detection_s: float
    pause_s: float
    forming_s: float
    reshard_s: float
    planning_s: float
    rest_s: float
    steps_again: int
    commit_s: float
    kept: bool
    join_s: float

    @property
    def total_s(self) -> float:
        """SIGKILL to the first committed step, less the steps that are made until then."""
        return self.detection_s + self.pause_s + self.planning_s + self.rest_s

    @property
    def leaving_s(self) -> float:
        """Of the pause, until the survivors have left the old world and the next begins."""
        return max(0.0, self.pause_s - self.forming_s - self.reshard_s)


@dataclass(frozen=True)
class Recoveries:
    """All SIGKILLs of a run, and how many committed steps were lost to them."""

    each: tuple[Recovery, ...]
    lost_steps: int


def kill_actors(folder: Path, kills: int, seed: int) -> Recoveries:
    """Trains in `folder` until `kills` actors were killed and replaced, one at a time."""
    killer = Killer(kills, seed)
    run = train(folder, "kills", killer, big_model())
    events = list(read_json_lines(run / "events.jsonl"))
    return Recoveries(
        each=tuple(recovery_of(kill, events) for kill in killer.done),
        lost_steps=lost_steps(killer.commits, events),
    )


def recovery_of(kill: Kill, events: Sequence[Event]) -> Recovery:
    """From the events of a run, in which nothing else went wrong meanwhile."""
    later = [event for event in events if event["time"] > kill.time]
    generations = [event for event in later if event["kind"] == "generation"]
    death = next(event for event in generations if event["cause"] == "death")
    join = next(event for event in generations if event["generation"] > death["generation"])
    steps = {event["step"]: event for event in events if event["kind"] == "step"}
    first = steps[death["at_step"]]
    # The first is committed when the next ends, or by a settlement where there is no next one.
    made = [first]
    following = steps.get(first["step"] + 1)
    if following and following["generation"] == first["generation"]:
        made.append(following)
    survivors = set(kill.pids) - {kill.pid}
    first_new = death["at_step"] + death["steps_again"]
    steps_s = sum(event["step_s"] for event in made)
    return Recovery(
        detection_s=death["time"] - death["pause_s"] - kill.time,
        pause_s=death["pause_s"],
        forming_s=death["form_s"] + death["build_s"],
        reshard_s=death["restore_s"],
        planning_s=first["plan_wait_s"],
        # A rank's step may begin before the slowest one has joined, or has ended the step before.
        rest_s=max(0.0, first["time"] - death["time"] - first["plan_wait_s"] - steps_s),
        steps_again=death["steps_again"],
        commit_s=sum(event["step_s"] for event in made[1:] if event["step"] >= first_new),
        kept=set(death["pids"]) == survivors and survivors <= set(join["pids"]),
        join_s=join["pause_s"],
    )


def lost_steps(commits: Sequence[int], events: Sequence[Event]) -> int:
    """Steps that were said to be committed and then made again, or are not written down."""
    written = [event["step"] for event in events if event["kind"] == "step"]
    again = len(commits) - len(set(commits))
    return again + len(set(commits) - set(written)) + len(written) - len(set(written))


class Killer(Stopping):
    """SIGKILLs one of four members when they have worked for some steps; in the end stops."""

    def __init__(self, kills: int, seed: int) -> None:
        self.done: list[Kill] = []
        self.commits: list[int] = []
        self._left, self._random = kills, Random(seed)
        self._pids: tuple[int, ...] = ()
        self._steps = 0  # of these members

    def on_generation(self, event: GenerationEvent) -> None:
        """Who there is."""
        self._pids, self._steps = tuple(event.pids), 0

    def on_commit(self, step: int) -> None:
        """What must not be lost any more."""
        self.commits.append(step)

    def on_step(self, event: StepEvent) -> None:
        """A SIGKILL at some moment of the step that runs now."""
        self._steps += len(self._pids) == RANKS
        if self._steps != SETTLED:
            return
        if not self._left:
            self.stop()
            return
        self._left -= 1
        delay_s = self._random.uniform(0, event.step_s)
        threading.Thread(target=self._kill, args=(delay_s, self._pids)).start()

    def _kill(self, delay_s: float, pids: tuple[int, ...]) -> None:
        time.sleep(delay_s)
        pid = self._random.choice(pids)
        self.done.append(Kill(time.time(), pid, pids))
        os.kill(pid, signal.SIGKILL)
