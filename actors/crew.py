"""The actors of a run, by number: asked of Ray, heard of when they have started, ended.

Actors have no placement group (it cannot grow, and it is rescheduled in a busy loop after a node
has died) and are never restarted by Ray: who is a member is the driver's decision. Actors that are
wanted and cannot be had yet stay pending in Ray: that is the demand which its autoscaler sees, and
it ends with the driver.
"""

from __future__ import annotations

import os
import time
from itertools import count
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from flexray.actors.settings import EngineSettings
from flexray.actors.worker import Place, Worker
from flexray.datasets.data_source import RowSource


class PoolError(RuntimeError):
    """An actor did not start, or failed in a way that another generation does not mend."""


class ImpossibleRequest(ValueError):
    """The cluster can never have what is asked for: one line for the user."""


class Crew:
    """Actors of one GPU each, or one CPU.

    Attributes:
        actors: handles by number, those that start included.
        places: of those that have started.
    """

    def __init__(
        self,
        device: str,
        settings: EngineSettings,
        data: RowSource,
        shared: Path | None,
        worker: Any = Worker,
    ) -> None:
        """`shared`: a file that every actor must see, in the folder that all write to.

        `worker`: the actors' class.
        """
        environment = {
            # One thread a rank on CPUs; NCCL keeps the order in which we issue collectives.
            "OMP_NUM_THREADS": "1",
            "NCCL_LAUNCH_ORDER_IMPLICIT": "1",
            # A rank that is aborted goes on: torch must not end its process.
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"),
        }
        self._class = worker.options(
            num_cpus=1,
            num_gpus=1 if device == "cuda" else 0,
            runtime_env={"env_vars": environment},
        )
        self._arguments = (settings, data, device)
        self._shared = shared
        self.actors: dict[int, Any] = {}
        self.places: dict[int, Place] = {}
        self._numbers = count()
        self._calls: dict[ray.ObjectRef, int] = {}  # that end when an actor has started
        self._failures = 0
        self._pause_ends = 0.0
        self._news: list[str] = []

    @property
    def starting(self) -> list[int]:
        """Actors that have been asked for and are not there yet, the oldest first."""
        return list(self._calls.values())

    def ask(self, actors: int) -> None:
        """Asks for more, unless some have just failed to start."""
        if time.monotonic() < self._pause_ends:
            return
        for _ in range(actors):
            number, actor = next(self._numbers), self._class.remote(*self._arguments)
            self.actors[number] = actor
            self._calls[actor.place.remote(self._shared)] = number

    def started(self, timeout_s: float, *, is_first: bool = False) -> list[int]:
        """Waits for actors that have started since the last call; those that have.

        Raises PoolError for one that fails at first, ImpossibleRequest for one that does not see
        the shared file. Later ones are asked for again, ever more slowly.
        """
        if not self._calls:
            return []
        started = []
        done, _ = ray.wait(list(self._calls), num_returns=len(self._calls), timeout=timeout_s)
        for call in done:
            actor = self._calls.pop(call)
            try:
                self.places[actor] = self._usable(ray.get(call))
            except (RayError, ImpossibleRequest) as error:
                self.end(actor)
                if is_first and isinstance(error, ImpossibleRequest):
                    raise
                # Of an error in the constructor Ray tells the traceback; its end is it.
                why = f"an actor did not start: {str(error).strip().splitlines()[-1]}"
                if is_first:
                    raise PoolError(why) from None
                self._put_off(why)
            else:
                self._failures = 0
                started.append(actor)
        return started

    def news(self) -> list[str]:
        """What a user ought to know, in lines, since the last call."""
        news, self._news = self._news, []
        return news

    def end(self, actor: int) -> None:
        """Ends an actor, whatever its state, and forgets it."""
        self.places.pop(actor, None)
        self._calls = {call: a for call, a in self._calls.items() if a != actor}
        if handle := self.actors.pop(actor, None):
            ray.kill(handle)

    def _usable(self, place: Place) -> Place:
        if place.is_blind:
            assert self._shared is not None
            raise ImpossibleRequest(
                f"{self._shared.parent}: node {place.node} does not see this folder of "
                "checkpoints: set checkpoint.dir to a folder that all nodes share, or to a URL"
            )
        return place

    def _put_off(self, why: str) -> None:
        self._failures += 1
        pause_s = min(60.0, 2.0**self._failures)
        self._pause_ends = time.monotonic() + pause_s
        self._news.append(f"{why} (another one is asked for in {pause_s:g} s)")


def check_resources(size: int, device: str, key: str = "cluster.gpus") -> int:
    """How many GPUs (or CPUs) the cluster has; `key` of the config wants `size`.

    Raises ImpossibleRequest with what is needed and what is there, where Ray would wait.
    """
    kind = "GPU" if device == "cuda" else "CPU"
    nodes = [node for node in ray.nodes() if node["Alive"]]
    have = [int(node["Resources"].get(kind, 0)) for node in nodes]
    if sum(have) < size:
        raise ImpossibleRequest(
            f"{key}={size} needs {size} {kind}s and the cluster has {sum(have)} "
            f"({', '.join(map(str, have))} on {len(have)} node{'s'[: len(have) != 1]}): "
            f"lower {key} or add nodes"
        )
    return sum(have)
