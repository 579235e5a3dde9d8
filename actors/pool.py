"""The pool: one actor per GPU, and the generations that they form.

Actors have no placement group (it cannot grow, and it is rescheduled in a busy loop after a node
has died) and are never restarted by Ray: who is a member is the driver's decision.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import ray
import torch.distributed as dist
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from flexray.actors.seat import Initial, Seat
from flexray.actors.settings import EngineSettings
from flexray.actors.work import EvaluationReport, RankStep, StepReport
from flexray.actors.worker import Place, Worker
from flexray.datasets.data_source import DataSource
from flexray.solver.cluster import Cluster

START_TIMEOUT_S = 300.0
GRACE_S = 10.0  # for the others' answers when one rank has failed


class PoolError(RuntimeError):
    """An actor did not start or is lost: one line for the user."""


class ImpossibleRequest(ValueError):
    """The cluster can never have what is asked for: one line for the user."""


@dataclass(frozen=True)
class Generation:
    """A numbered membership: who is in the world, in rank order."""

    number: int
    places: tuple[Place, ...]

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.places)

    @property
    def cluster(self) -> Cluster:
        """The nodes as the planner sees them."""
        return cluster_of(self.places)


def cluster_of(places: Sequence[Place]) -> Cluster:
    """The nodes of `places`, which are in rank order: node by node."""
    return Cluster(tuple(Counter(place.node for place in places).values()))


class Pool:
    """The actors of a run; a context manager that leaves none behind."""

    def __init__(self, size: int, device: str, settings: EngineSettings, data: DataSource) -> None:
        """Starts `size` actors on `device` ("cpu" or "cuda"), one GPU or one CPU each.

        Raises ImpossibleRequest at once when the cluster cannot have them.
        """
        check_resources(size, device)
        environment = {
            # One thread a rank on CPUs; NCCL keeps the order in which we issue collectives.
            "OMP_NUM_THREADS": "1",
            "NCCL_LAUNCH_ORDER_IMPLICIT": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"),
        }
        actor = Worker.options(  # type: ignore[attr-defined]
            num_cpus=1,
            num_gpus=1 if device == "cuda" else 0,
            runtime_env={"env_vars": environment},
        )
        self._workers = [actor.remote(settings, data, device) for _ in range(size)]
        # The driver owns the store: it outlives every generation. Port 0: any free one.
        self._host = ray.util.get_node_ip_address()
        self._store = dist.TCPStore(self._host, 0, is_master=True, wait_for_workers=False)

    def places(self) -> tuple[Place, ...]:
        """Where the actors run, in rank order: node by node. Waits until all have started.

        Raises PoolError when an actor dies or does not start in time.
        """
        places = self.wait([worker.place.remote() for worker in self._workers], "start")
        order = sorted(
            range(len(places)),
            key=lambda i: (places[i].node, len(places[i].gpu), places[i].gpu),  # 2 before 10
        )
        self._workers = [self._workers[i] for i in order]
        return tuple(places[i] for i in order)

    def form(self, number: int) -> Generation:
        """Forms generation `number` of all actors: they join one world and build the model.

        Raises PoolError when an actor dies or does not join in time.
        """
        places = self.places()
        world, port = len(places), self._store.port
        joins = [
            worker.join.remote(
                Seat(number, rank, world, world, self._host, port, buddy=1, origin=Initial())
            )
            for rank, worker in enumerate(self._workers)
        ]
        self.wait(joins, "join")
        return Generation(number, places)

    def dispatch(self, work: Sequence[RankStep]) -> list[ray.ObjectRef[StepReport]]:
        """Queues one step, `work` in rank order; it runs as soon as the one before has ended."""
        return [worker.step.remote(part) for worker, part in zip(self._workers, work, strict=True)]

    def evaluate(self, work: Sequence[RankStep]) -> list[ray.ObjectRef[EvaluationReport]]:
        """Queues one forward pass without training, like `dispatch`."""
        return [
            worker.evaluate.remote(part) for worker, part in zip(self._workers, work, strict=True)
        ]

    def save(self, location: str) -> tuple[list[ray.ObjectRef], list[ray.ObjectRef]]:
        """Queues a checkpoint behind what is queued.

        Returns calls that end with a SaveReport once the state is copied, and calls that end once
        all of it is written, with the reason where it could not be.
        """
        return (
            [worker.save.remote(location) for worker in self._workers],
            [worker.written.remote() for worker in self._workers],
        )

    def load(self, location: str, counters: dict[str, int]) -> None:
        """Has all ranks go on from a checkpoint. Raises PoolError when one cannot."""
        self.wait([worker.load.remote(location, counters) for worker in self._workers], "load")

    def sees(self, path: str) -> list[bool]:
        """Whether each rank sees a file of the driver's."""
        return self.wait([worker.sees.remote(path) for worker in self._workers], "look")

    def start_profile(self) -> None:
        """Has every rank record from behind what is queued."""
        for worker in self._workers:
            worker.start_profile.remote()

    def stop_profile(self) -> list[ray.ObjectRef[bytes]]:
        """Queues the end of the record; calls that end with each rank's Chrome trace."""
        return [worker.stop_profile.remote() for worker in self._workers]

    def wait(self, calls: Sequence[ray.ObjectRef], what: str) -> list:
        """The results of calls to all ranks, in rank order.

        Raises PoolError, naming the rank, as soon as one of them fails; ImpossibleRequest for
        settings that only the actors could find wrong, before the first step.
        """
        pending = list(calls)
        starting = what in ("start", "join")
        while pending:
            timeout = START_TIMEOUT_S if starting else None
            done, pending = ray.wait(pending, num_returns=1, timeout=timeout)
            if not done:
                raise PoolError(f"{len(pending)} of {len(calls)} actors did not {what} in time")
            try:
                ray.get(done[0], timeout=0)
            except GetTimeoutError:
                pending.append(done[0])
            except RayTaskError as error:
                if starting and isinstance(error.cause, ValueError):
                    raise ImpossibleRequest(_one_line(error.cause)) from None
                # A rank that dies breaks its neighbours' collectives, and they may be heard first.
                if dead := _first_dead(pending):
                    raise _death(calls, *dead, what) from None
                rank, why = calls.index(done[0]), _one_line(error.cause)
                raise PoolError(f"rank {rank} failed during {what}: {why}") from None
            except RayError as error:
                raise _death(calls, done[0], error, what) from None
        return ray.get(list(calls))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends every actor."""
        for worker in self._workers:
            ray.kill(worker)
        self._workers = []


def _first_dead(calls: list[ray.ObjectRef]) -> tuple[ray.ObjectRef, RayError] | None:
    """The first of these calls whose actor is lost, and how that is told, if they end soon."""
    ended, _ = ray.wait(calls, num_returns=len(calls), timeout=GRACE_S) if calls else ([], [])
    for call in ended:
        try:
            ray.get(call)
        except RayTaskError:
            continue
        except RayError as error:
            return call, error
    return None


def _death(
    calls: Sequence[ray.ObjectRef], call: ray.ObjectRef, error: RayError, what: str
) -> PoolError:
    # Of an error in the actor's constructor Ray tells the traceback; its end is it.
    why = str(error).strip().splitlines()[-1 if what == "start" else 0]
    return PoolError(f"rank {calls.index(call)} died during {what}: {why}")


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"


def check_resources(size: int, device: str) -> None:
    """Raises ImpossibleRequest with what is needed and what is there, where Ray would wait."""
    kind = "GPU" if device == "cuda" else "CPU"
    nodes = [node for node in ray.nodes() if node["Alive"]]
    have = [int(node["Resources"].get(kind, 0)) for node in nodes]
    if sum(have) < size:
        raise ImpossibleRequest(
            f"cluster.gpus={size} needs {size} {kind}s and the cluster has {sum(have)} "
            f"({', '.join(map(str, have))} on {len(have)} node{'s'[: len(have) != 1]}): "
            f"lower cluster.gpus or add nodes"
        )
