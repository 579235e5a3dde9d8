"""What goes wrong, and when: drawn from a seed, and done to a run that trains."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from random import Random

from flexray import Callback

# How often each happens, against the others.
KINDS = {
    "kill": 8,
    "kill two": 2,
    "kill, and again while the others recover": 3,
    "stop": 2,
    "scale": 4,
    "drain a node": 1,
    "kill a node": 1,
}


@dataclass(frozen=True)
class Event:
    """Something that goes wrong `delay_s` after a step."""

    step: int
    delay_s: float
    kind: str


def schedule(seed: int, events: int, steps: int, step_s: float) -> list[Event]:
    """`events` over `steps`, each at some moment of a step of about `step_s`."""
    random = Random(seed)
    drawn = random.choices(list(KINDS), list(KINDS.values()), k=events)
    every = steps / (events + 1)
    return [
        Event(round(number * every), random.uniform(0, 2 * step_s), kind)
        for number, kind in enumerate(drawn, 1)
    ]


class Chaos(Callback):
    """Does what a schedule says to the ranks of this run.

    `scale` asks the run for a size, `drain` and `kill_node` take a node away, `refill` brings
    others.
    """

    def __init__(
        self,
        events: list[Event],
        seed: int,
        *,
        sizes: range,
        scale: Callable[[int], None],
        drain: Callable[[str], None],
        kill_node: Callable[[str], None],
        refill: Callable[[], None],
    ) -> None:
        self.todo, self.random, self.sizes = list(events), Random(seed), sizes
        self.scale, self.drain, self.kill_node, self.refill = scale, drain, kill_node, refill
        self.pids: list[int] = []
        self.nodes: list[str] = []
        self.done: list[str] = []
        self.threads: list[threading.Thread] = []

    def on_generation(self, event):
        """Who there is to be killed."""
        self.pids, self.nodes = list(event.pids), list(event.nodes)

    def on_step(self, event):
        """One event at a time, the next when its step has come."""
        self.refill()
        if self.todo and event.step >= self.todo[0].step:
            due = self.todo.pop(0)
            thread = threading.Thread(target=self._do, args=(due,), daemon=True)
            thread.start()
            self.threads.append(thread)

    def _do(self, event):
        time.sleep(event.delay_s)
        pids = self.random.sample(self.pids, len(self.pids))
        if event.kind == "scale":
            self.scale(self.random.choice(self.sizes))
        elif event.kind == "drain a node":
            self.drain(self.random.choice(self.nodes))
        elif event.kind == "kill a node":
            self.kill_node(self.random.choice(self.nodes))
        elif event.kind == "stop":
            _signal(pids[0], signal.SIGSTOP)
        else:
            _signal(pids[0], signal.SIGKILL)
            if event.kind == "kill, and again while the others recover":
                time.sleep(self.random.uniform(0.1, 2.0))
            if event.kind != "kill" and len(pids) > 1:
                _signal(pids[1], signal.SIGKILL)
        self.done.append(event.kind)


def _signal(pid, number):
    with suppress(ProcessLookupError):  # it has ended in between
        os.kill(pid, number)
