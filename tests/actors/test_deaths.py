"""SIGKILL of ranks at every point of a step and of a re-shard: survivors go on as if nothing was.

Real processes run what a Ray actor runs, without Ray; `Run` is a driver in small.
"""

from __future__ import annotations

import functools
import os
import signal
import time
from collections import defaultdict
from contextlib import suppress
from multiprocessing.connection import wait

import pytest
import torch
import torch.distributed as dist

from flexray.actors import replication, reshard
from flexray.actors import worker as worker_module
from flexray.actors.gang import Gang
from flexray.actors.host_copy import HostCopy
from flexray.actors.membership import newest_copies
from flexray.actors.rendezvous import ABANDONED
from flexray.actors.seat import Initial, Seat
from flexray.actors.settings import EngineSettings
from flexray.solver.communicators import CommunicatorCache
from tests.actors.models import config, label_tokens, sequences, work_of
from tests.worlds import _context

BATCH = sequences([40, 9, 23, 5, 17, 31, 2, 60])
SETTINGS = EngineSettings(
    # 4 rows of a head's norm: some ranks hold all, some none.
    model=config("qwen3", head_dim=4, tie_word_embeddings=True),
    dtype="float64",
    timeout_s=60,
)
STEPS = 6


class Rows:
    """What a worker reads its rows from."""

    def open(self):
        return self

    def read(self, row):
        return BATCH[row]


def serve(pipe):
    """A worker's process."""
    torch.set_num_threads(1)
    replication.PIECE = 4096
    worker_module.restore = functools.partial(reshard.restore, staging=1 << 14)  # many rounds
    worker = worker_module.Worker.__ray_metadata__.modified_class(SETTINGS, Rows(), "cpu")
    with suppress(EOFError):
        answer(pipe, worker)


def answer(pipe, worker):
    """Calls come through the pipe, and results go back."""
    while True:
        method, *args = pipe.recv()
        if method == "die at":
            POINTS[args[0]](worker)
            continue
        try:
            pipe.send((True, getattr(worker, method)(*args)))
        except Exception as error:
            pipe.send((False, f"{type(error).__name__}: {error}"))


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def dying(owner, name, *, call=1, after=False):
    """Has the process die in the `call`-th call from now on of a function, or after it."""
    function, calls = getattr(owner, name), 0

    def wrapper(*args, **keys):
        nonlocal calls
        calls += 1
        if calls == call and not after:
            die()
        result = function(*args, **keys)
        if calls == call:
            die()
        return result

    setattr(owner, name, wrapper)


def slow_down(owner, name):
    """Lets some time pass with every item of a generator."""
    function = getattr(owner, name)

    def wrapper(*args):
        for item in function(*args):
            time.sleep(0.01)
            yield item

    setattr(owner, name, wrapper)


def in_the_middle(owner, name, *, items):
    """Has the process die when a generator has given so many."""
    function = getattr(owner, name)

    def wrapper(*args):
        for number, item in enumerate(function(*args)):
            if number == items:
                die()
            yield item

    setattr(owner, name, wrapper)


POINTS = {
    "forward": lambda w: w.engine.model.layers[1].register_forward_pre_hook(die),
    "backward": lambda w: w.engine.model.layers[0].register_full_backward_pre_hook(die),
    "all-to-all": lambda w: dying(Gang, "all_to_all", call=3),
    "before the commit": lambda w: dying(dist, "all_reduce"),
    "after the commit": lambda w: dying(dist, "all_reduce", after=True),
    "before the optimizer": lambda w: dying(w.engine.optimizer, "step"),
    "after the optimizer": lambda w: dying(w.engine.optimizer, "step", after=True),
    "snapshot": lambda w: dying(HostCopy, "view", call=20),
    "replication": lambda w: in_the_middle(replication, "_pieces", items=5),
    "meeting": lambda w: dying(worker_module, "raw_group"),
    "met": lambda w: dying(worker_module, "raw_group", after=True),
    "building": lambda w: dying(worker_module, "meet"),
    "before the transfer": lambda w: dying(reshard, "_exchange"),
    "checksums": lambda w: dying(reshard, "checksum", call=9),
    "first snapshot": lambda w: dying(HostCopy, "take"),
    "in mid transfer": lambda w: dying(reshard, "_exchange", call=3),
    "slow replication, no death": lambda w: slow_down(replication, "_pieces"),
}
IN_A_STEP, IN_A_JOIN = list(POINTS)[:9], list(POINTS)[9:15]


SPARE = []  # pipes and processes that have survived a run


def start():
    here, there = _context.Pipe()
    process = _context.Process(target=serve, args=(there,), daemon=True)
    process.start()
    there.close()
    return here, process


class Lost(Exception):
    """No state is left that the copies of the survivors cover."""


class Run:
    """A run with actors that die as planned.

    deaths: {("join", generation), ("first step", generation) or ("step", number): {actor: point}}.
    sizes: {step after which the world is to have another size: the size}.
    Attributes:
        losses: by step, of all ranks and all times that it was run.
        went_back: by generation after the first: the last step that a rank had reported, and the
            step that all went back to.
        freed_s: the longest time from a death to the last answer of a survivor.
    """

    def __init__(self, world, deaths, sizes, one_node):
        self.one_node = one_node
        self.target, self.deaths, self.sizes = world, dict(deaths), dict(sizes)
        self.losses, self.went_back, self.freed_s = defaultdict(list), [], 0.0
        self._owners = {}
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._pipes, self._processes = {}, {}
        for actor in range(world):
            self._pipes[actor], self._processes[actor] = SPARE.pop() if SPARE else start()

    def finish(self):
        generation, done = 0, self._generation(0, Initial())
        while done < STEPS:
            generation += 1
            left, _ = self._together(generation, "leave", dict.fromkeys(self._pipes, ()))
            holdings = {actor: one.holdings for actor, one in left.items()}
            origin = newest_copies(holdings, self._owners, tuple(self._pipes))
            if origin is None:
                raise Lost
            self.went_back.append((max(self.losses), origin.step))
            done = self._generation(generation, origin)

    def _generation(self, generation, origin):
        """Forms a generation and trains in it as long as that goes well, or to the last step."""
        actors = tuple(self._pipes)
        world = self._owners[generation] = min(self.target, len(actors))
        seats = {
            actor: (
                Seat(
                    *(generation, number, world, len(actors), "127.0.0.1", self._store.port),
                    buddy=1,
                    origin=origin,
                    one_node=self.one_node,
                ),
            )
            for number, actor in enumerate(actors)
        }
        if not self._together(generation, "join", seats, ("join", generation))[1]:
            return 0
        for leaver in actors[world:]:
            self._dismiss(leaver)
        caches = [CommunicatorCache(8) for _ in range(world)]
        for step in range(origin.step + 1, STEPS + 1):
            work = {
                actor: (self._work(rank, world, caches[rank], step, generation),)
                for rank, actor in enumerate(actors[:world])
            }
            first = ("first step", generation)
            moment = first if first in self.deaths else ("step", step)
            reports, whole = self._together(generation, "step", work, moment)
            for report in reports.values():
                self.losses[step].append(report.loss)
            if not whole:
                return 0
            if step in self.sizes:
                self.target = self.sizes.pop(step)
                self._together(generation, "settle", dict.fromkeys(self._pipes, (step,)))
                return 0
        return STEPS

    def _work(self, rank, world, communicators, step, generation):
        """Two ranks for one half of the rows, each rank alone for the other."""
        pairs = [tuple(range(world))[i : i + 2] for i in range(0, world, 2)]
        plan = [
            [(pair, tuple(range(4))[i :: len(pairs)]) for i, pair in enumerate(pairs)],
            [((r,), tuple(range(4, 8))[r::world]) for r in range(world)],
        ]
        return work_of(rank, plan, label_tokens(BATCH), communicators, step, generation)

    def _together(self, generation, method, arguments, moment=None):
        """Calls a method of all; their results, and whether all gave one."""
        for actor, point in self.deaths.pop(moment, {}).items():
            self._pipes[actor].send(("die at", point))
        for actor, values in arguments.items():
            with suppress(BrokenPipeError):  # it died after its last answer
                self._pipes[actor].send((method, *values))
        waiting = {self._pipes[actor]: actor for actor in arguments}
        results, died_at = {}, None
        while waiting:
            ready = wait(waiting, timeout=SETTINGS.timeout_s)
            assert ready, f"{method}: no answer from {list(waiting.values())}"
            for pipe in ready:
                actor = waiting.pop(pipe)
                try:
                    good, result = pipe.recv()
                except (EOFError, ConnectionResetError):
                    died_at = died_at or time.monotonic()
                    self._bury(actor)
                    self._store.set(f"generation{generation}/{ABANDONED}", "")
                else:
                    if good:
                        results[actor] = result
                    assert good or result.startswith("CollectiveFailed"), result
        if died_at is not None:
            self.freed_s = max(self.freed_s, time.monotonic() - died_at)
        return results, len(results) == len(arguments)

    def _bury(self, actor):
        self._pipes.pop(actor).close()
        process = self._processes.pop(actor)
        process.kill()
        process.join()

    def _dismiss(self, actor):
        SPARE.append((self._pipes.pop(actor), self._processes.pop(actor)))

    def close(self, whole):
        """Ends the run; what is left of its processes serves the next one, if all went well."""
        for actor in list(self._pipes):
            self._dismiss(actor) if whole else self._bury(actor)


def run(world, deaths=(), sizes=(), *, one_node=False):
    one = Run(world, deaths, sizes, one_node)
    whole = False
    try:
        one.finish()
        whole = True
    finally:
        one.close(whole)
    return one


@pytest.fixture(scope="module")
def undisturbed():
    yield run(1).losses
    for _, process in SPARE:
        process.kill()
        process.join()
    SPARE.clear()


def check(one, undisturbed, generations):
    assert len(one.went_back) == generations - 1
    for reported, step in one.went_back:
        # A step is committed once one after it is reported; the copies may be newer.
        assert reported - 1 <= step <= reported + 1
    assert sorted(one.losses) == list(range(1, STEPS + 1))
    for step, losses in one.losses.items():
        assert losses == pytest.approx([undisturbed[step][0]] * len(losses), rel=1e-10), step
    assert one.freed_s < SETTINGS.timeout_s / 2


@pytest.mark.parametrize("point", IN_A_STEP)
def test_in_a_step(undisturbed, point):
    check(run(4, {("step", 3): {1: point}}), undisturbed, 2)


@pytest.mark.parametrize("point", ["after the commit", "snapshot", "first snapshot"])
def test_where_ranks_share_their_copies(undisturbed, point):
    moment, who = (("join", 1), 3) if point in IN_A_JOIN else (("first step", 1), 2)
    deaths = {("step", 3): {1: "after the optimizer"}, moment: {who: point}}
    check(run(4, deaths, sizes={4: 2}, one_node=True), undisturbed, 4)


@pytest.mark.parametrize("point", IN_A_STEP[3:])
def test_in_the_first_step_of_a_generation_that_a_death_began(undisturbed, point):
    deaths = {("step", 3): {1: "backward"}, ("first step", 1): {3: point}}
    check(run(4, deaths), undisturbed, 3)


def test_of_a_rank_whose_copies_are_long_under_way(undisturbed):
    deaths = {("step", 1): {1: "slow replication, no death"}, ("step", 5): {1: "forward"}}
    check(run(4, deaths), undisturbed, 2)


@pytest.mark.parametrize("point", IN_A_JOIN)
def test_in_a_join_that_another_death_began(undisturbed, point):
    check(run(4, {("step", 3): {1: "backward"}, ("join", 1): {3: point}}), undisturbed, 3)


def test_in_a_join_and_in_the_next_that_repairs_it(undisturbed):
    # In the second one actor 3 has all it needs, and dies while others move rows.
    deaths = {("join", 1): {1: "in mid transfer"}, ("join", 2): {3: "before the transfer"}}
    check(run(4, deaths, sizes={2: 3}), undisturbed, 4)


def test_of_a_leaver_that_serves_its_copies(undisturbed):
    check(run(4, {("join", 1): {3: "in mid transfer"}}, sizes={2: 2}), undisturbed, 3)


def test_leavers_stay_until_what_they_served_is_held_twice(undisturbed):
    # Only they have what owners 2 and 3 of the old world held.
    slow, death = {0: "slow replication, no death"}, {0: "forward"}
    check(run(4, {("join", 1): slow, ("first step", 1): death}, sizes={2: 2}), undisturbed, 3)


def test_of_two_at_once_that_are_no_buddies(undisturbed):
    check(run(4, {("step", 3): {0: "forward", 2: "backward"}}), undisturbed, 2)


def test_of_two_buddies_at_once_leaves_no_state():
    with pytest.raises(Lost):
        run(4, {("step", 3): {1: "before the commit", 2: "before the commit"}})


def test_of_all_but_one(undisturbed):
    check(run(2, {("step", 3): {0: "after the optimizer"}}), undisturbed, 2)
