"""The pool: one actor per GPU, and the generations that they form."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import ray
import torch.distributed as dist
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from flexray.actors.checkpoint import CheckpointFailed
from flexray.actors.crew import Crew, ImpossibleRequest, PoolError, check_resources
from flexray.actors.drains import Drains
from flexray.actors.membership import Change, Membership, buddy_shift, newest_copies
from flexray.actors.pulse import Pulse
from flexray.actors.rendezvous import ABANDONED, CollectiveFailed
from flexray.actors.reshard import CorruptState
from flexray.actors.seat import Copies, Holding, Initial, JoinReport, Saved, Seat
from flexray.actors.settings import EngineSettings
from flexray.actors.work import EvaluationReport, RankStep, StepReport
from flexray.actors.worker import Place, Worker
from flexray.datasets.data_source import RowSource
from flexray.solver.cluster import Cluster

START_TIMEOUT_S = 300.0
BUSY_S = 30.0  # without another actor: then the cluster's others have the rest
LOOK_S = 0.5  # between looks at what does not come by itself
LEAVE_SLACK_S = 30.0  # over a collective's time-out


class Broken(PoolError):
    """A generation is over: a member is lost, or a collective failed. `regroup`, then `form`."""


@dataclass(frozen=True)
class Generation:
    """A numbered membership: who is in the world, in rank order, and what joining took."""

    number: int
    places: tuple[Place, ...]
    joined: tuple[JoinReport, ...] = ()

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


@dataclass(frozen=True)
class Losses:
    """Who was lost with a generation, by rank, and who ran out of memory and is still there."""

    dead: tuple[int, ...]
    hung: tuple[int, ...]
    full: tuple[int, ...] = ()

    @property
    def cause(self) -> Literal["death", "hang", "memory"]:
        """What the next generation is made for."""
        if self.hung:
            return "hang"
        return "memory" if self.full and not self.dead else "death"

    def __bool__(self) -> bool:
        return bool(self.dead or self.hung)

    def __str__(self) -> str:
        said = [
            f"rank{'s'[: len(ranks) != 1]} {', '.join(map(str, ranks))} {what}"
            for ranks, what in (
                (self.dead, "died"),
                (self.hung, "did not answer"),
                (self.full, "ran out of memory"),
            )
            if ranks
        ]
        return " and ".join(said) or "no rank was lost"


class Pool:
    """The actors of a run; a context manager that leaves none behind."""

    def __init__(
        self,
        membership: Membership,
        device: str,
        settings: EngineSettings,
        data: RowSource,
        *,
        at_start: int | None = None,
        shared: Path | None = None,
        silence_s: float = 30.0,
        worker: Any = Worker,
    ) -> None:
        """Asks Ray for as many actors as `membership` wants, one GPU or one CPU ("cpu") each.

        Args:
            membership: what is wanted; the pool tells it what happens.
            device: "cpu" or "cuda".
            settings: what is trained.
            data: what on.
            at_start: how many must be there to begin; None: all that are wanted.
            shared: a file that every actor must see, in the folder that all write to.
            silence_s: an actor that does not answer for so long is hung.
            worker: the actors' class.

        Raises:
            ImpossibleRequest: the cluster cannot have `at_start` now.
        """
        self.membership = membership
        key = "cluster.min_gpus" if at_start else "cluster.gpus"
        self._have = check_resources(at_start or membership.target, device, key)
        self._crew = Crew(device, settings, data, shared, worker)
        self._timeout_s, self._shard_size = settings.timeout_s, settings.shard_size
        self._ranks: tuple[int, ...] = ()  # the actors of the present generation, also lost ones
        self._is_between = False  # one generation has ended and the next is not formed
        self._number = 0
        self._owners: dict[int, int] = {}
        self._holdings: dict[int, tuple[Holding, ...]] = {}
        self._origin: Initial | Saved | Copies = Initial()
        self._corrupt: set[tuple[int, int]] = set()  # generation and step of copies not to use
        self._hung: set[int] = set()
        self._pulse, self._drains = Pulse(silence_s), Drains()
        self._host = ray.util.get_node_ip_address()
        self._ask_for_actors()

    def start(self) -> None:
        """Waits until all actors that the cluster has room for have started.

        Raises PoolError when one dies or does not start in time.
        """
        wanted = min(self.membership.target, self._have)
        began = last_news = time.monotonic()
        while (missing := wanted - len(self.membership.alive)) > 0:
            now = time.monotonic()
            if self.membership.wanted() and now - last_news > BUSY_S:
                return  # the others join when they come
            if now - began > START_TIMEOUT_S:
                raise PoolError(f"{missing} of {wanted} actors did not start in time")
            if self._hear_of_starts(LOOK_S, is_first=True):
                last_news = now

    def watch(self) -> None:
        """Hears, without waiting, of actors that have started and nodes that drain."""
        self._hear_of_starts(0.0)
        self.membership.drain(self._drains.nodes())
        # Survivors first: an actor that starts takes their cores' time.
        if not (self._is_between and self.candidates()):
            self._ask_for_actors()

    def news(self) -> list[str]:
        """What a user ought to know, in lines, since the last call."""
        return self._crew.news()

    def candidates(self) -> tuple[Place, ...]:
        """The members that the next generation would have; none while there are too few."""
        return tuple(self._crew.places[actor] for actor in self.membership.wanted())

    @property
    def change(self) -> Change | None:
        """Why another generation is due, if one is."""
        return self.membership.change

    def form(self, number: int, origin: Initial | Saved | Copies) -> Generation:
        """Forms generation `number` of the candidates, who join one world and build the model.

        `origin`: where the training state comes from. Actors that are no longer wanted serve the
        host copies that they hold, and then end. Raises Broken when an actor dies meanwhile.
        """
        members = self.membership.wanted()
        places = self.candidates()
        leavers = self._leavers(members, origin) if isinstance(origin, Copies) else []
        before, self._ranks = self._ranks, (*members, *leavers)
        self._number = number
        # The driver owns it: whoever dies, the others meet there. One a generation: keys of many
        # would pile up. Port 0: any free one.
        self._store = dist.TCPStore(self._host, 0, is_master=True, wait_for_workers=False)
        self._owners[number], self._origin = self._shard_size or len(members), origin
        seats = [
            Seat(
                generation=number,
                rank=rank,
                world=len(members),
                participants=len(self._ranks),
                host=self._host,
                port=self._store.port,
                buddy=buddy_shift([place.node for place in places]),
                origin=origin,
                one_node=len({place.node for place in places}) == 1,
            )
            for rank in range(len(self._ranks))
        ]
        joins = [
            worker.join.remote(seat) for worker, seat in zip(self._workers, seats, strict=True)
        ]
        joined = self.wait(joins, "join")
        self._ranks, self._is_between = members, False
        self.membership.formed(members)
        for actor in {*before, *leavers} - {*members}:
            self._end(actor)
        return Generation(number, places, tuple(joined[: len(members)]))

    def regroup(self) -> Losses:
        """Has every actor leave its generation, and forgets those that are dead or hung.

        Also the first half of a planned change: then nobody is lost.
        """
        self._is_between = True
        calls = {self._crew.actors[a].leave.remote(): a for a in self.membership.alive}
        deadline = time.monotonic() + self._timeout_s + LEAVE_SLACK_S
        self._holdings, full = {}, set[int]()
        while calls:
            done, _ = ray.wait(list(calls), num_returns=1, timeout=LOOK_S)
            for call in done:
                actor = calls.pop(call)
                try:
                    left = ray.get(call)
                except RayError:
                    self._end(actor)
                else:
                    self._holdings[actor] = left.holdings
                    full |= {actor} if left.ran_out else set()
            silent = self._pulse.silent({a: self._crew.actors[a] for a in calls.values()})
            if time.monotonic() > deadline:  # alive, and yet it never comes back
                silent = list(calls.values())
            for call in [call for call, actor in calls.items() if actor in silent]:
                actor = calls.pop(call)
                self._hung.add(actor)
                self._end(actor)
        lost = [(rank, a) for rank, a in enumerate(self._ranks) if a not in self.membership.alive]
        return Losses(
            dead=tuple(rank for rank, actor in lost if actor not in self._hung),
            hung=tuple(rank for rank, actor in lost if actor in self._hung),
            full=tuple(rank for rank, actor in enumerate(self._ranks) if actor in full),
        )

    def newest_copies(self) -> Copies | None:
        """The newest state that the actors' host copies cover, after `regroup`."""
        members = self.membership.wanted()
        trusted = {
            actor: [h for h in held if (h.generation, h.step) not in self._corrupt]
            for actor, held in self._holdings.items()
        }
        newest = newest_copies(trusted, self._owners, list(trusted))
        if newest is None:
            return None
        participants = (*members, *self._leavers(members, newest))
        return newest_copies(trusted, self._owners, participants)

    def settle(self, step: int) -> None:
        """Has `step` committed on every rank; nothing may be queued. Raises Broken."""
        self.wait([worker.settle.remote(step) for worker in self._workers], "settle")

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

    def start_profile(self) -> None:
        """Has every rank record from behind what is queued."""
        for worker in self._workers:
            worker.start_profile.remote()

    def stop_profile(self) -> list[ray.ObjectRef[bytes]]:
        """Queues the end of the record; calls that end with each rank's Chrome trace."""
        return [worker.stop_profile.remote() for worker in self._workers]

    def wait(self, calls: Sequence[ray.ObjectRef], what: str) -> list:
        """The results of calls to all ranks, in rank order.

        Raises Broken as soon as a rank is lost or a collective fails, naming it; ImpossibleRequest
        for settings that only the actors could find wrong; PoolError for any other failure.
        """
        pending, results = list(calls), {}
        while pending:
            done, pending = ray.wait(pending, num_returns=1, timeout=LOOK_S)
            if not done:
                self._check_pulse(what)
                continue
            try:
                results[done[0]] = ray.get(done[0], timeout=0)
            except GetTimeoutError:
                pending.append(done[0])
            except RayTaskError as error:
                rank, cause = calls.index(done[0]), error.cause
                line = f"rank {rank} failed during {what}: {_one_line(cause)}"
                if isinstance(cause, CorruptState) and isinstance(self._origin, Copies):
                    self._corrupt.add((self._origin.generation, self._origin.step))
                # A rank that dies while a checkpoint is read spoils it for the others.
                is_unread = what == "join" and isinstance(cause, CheckpointFailed)
                if isinstance(cause, CorruptState | CollectiveFailed) or is_unread:
                    raise self._broken(line) from None
                if what == "join" and isinstance(cause, ValueError):
                    raise ImpossibleRequest(_one_line(cause)) from None
                raise PoolError(line) from None
            except RayError as error:
                rank = calls.index(done[0])
                self._end(self._ranks[rank])
                line = f"rank {rank} died during {what}: {_first_line(error)}"
                raise self._broken(line) from None
        return [results[call] for call in calls]

    def is_busy(self, calls: Sequence[ray.ObjectRef]) -> bool:
        """Whether every rank still works on what it was sent."""
        return bool(calls) and not ray.wait(list(calls), timeout=0)[0]

    def answered(self, calls: Sequence[ray.ObjectRef]) -> list:
        """The results of those calls that have ended well, after `regroup`."""
        done, _ = ray.wait(list(calls), num_returns=len(calls), timeout=0) if calls else ([], [])
        return list(_results(done))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends every actor."""
        for actor in list(self._crew.actors):
            self._end(actor)

    @property
    def _workers(self) -> list[Any]:
        return [self._crew.actors[actor] for actor in self._ranks]

    def _leavers(self, members: Sequence[int], origin: Copies) -> list[int]:
        """Actors outside `members` that have host copies of `origin`."""
        state = (origin.generation, origin.step)
        return [
            actor
            for actor, held in self._holdings.items()
            if actor not in members and any((h.generation, h.step) == state for h in held)
        ]

    def _check_pulse(self, what: str) -> None:
        """Raises Broken when a rank is stopped: its neighbours would wait for it for long."""
        ranks = {actor: self._crew.actors[actor] for actor in self._ranks}
        for actor in self._pulse.silent(ranks):
            rank = self._ranks.index(actor)
            self._hung.add(actor)
            self._end(actor)
            raise self._broken(
                f"rank {rank} did not answer for {self._pulse.limit_s:g} s during {what}"
            )

    def _broken(self, line: str) -> Broken:
        """Frees the ranks that still wait for one another: their generation is over."""
        self._store.set(f"generation{self._number}/{ABANDONED}", "")
        for actor in self.membership.alive:
            self._crew.actors[actor].abort.remote()
        return Broken(line)

    def _ask_for_actors(self) -> None:
        """As many as are wanted: those on nodes that drain are to be replaced."""
        staying = [actor for actor in self.membership.alive if self.membership.stays(actor)]
        starting = self._crew.starting
        missing = self.membership.target - len(staying) - len(starting)
        self._crew.ask(missing)
        spare = [a for a in staying if a not in self._ranks]
        for actor in [*starting[::-1], *spare][: max(0, -missing)]:
            self._end(actor)

    def _hear_of_starts(self, timeout_s: float, *, is_first: bool = False) -> bool:
        """Takes in the actors that have started; whether there were any."""
        started = self._crew.started(timeout_s, is_first=is_first)
        for actor in started:
            place = self._crew.places[actor]
            self.membership.started(actor, place.node, place.gpu)
        return bool(started)

    def _end(self, actor: int) -> None:
        self.membership.lost(actor)
        self._holdings.pop(actor, None)
        self._crew.end(actor)


def _results(calls: Sequence[ray.ObjectRef]) -> Iterator[Any]:
    for call in calls:
        with suppress(RayError):
            yield ray.get(call)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    ours = isinstance(error, ValueError | CollectiveFailed | CorruptState)
    return text if ours else f"{type(error).__name__}: {text}"
