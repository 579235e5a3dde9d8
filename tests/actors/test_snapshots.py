"""The commit rule on real processes: wherever one is killed, the others hold what was committed."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import threading
import time
from contextlib import suppress

import pytest
import torch

from flexray.actors import replication
from flexray.actors.host_copy import KINDS, Entry, HostCopy, Layout
from flexray.actors.membership import newest_copies
from flexray.actors.rendezvous import CollectiveFailed, raw_group
from flexray.actors.snapshots import Snapshots
from tests.worlds import run_world

CPU = torch.device("cpu")
ENTRIES = (Entry("wide", (41, 100), torch.float64), Entry("narrow", (9,), torch.float32))
WORLD, DIES_IN, STEPS = 4, 3, 7
POINTS = (
    "backward",
    "pre_opt",
    "post_opt",
    "mid_copy",
    "post_copy",
    "mid_send",
    "replicated",
    "before_commit",
)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def digest(tensors):
    return hashlib.blake2b(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest()


def parts(layout, copy):
    """A copy's tensors in the order of `Toy.tensors`."""
    return [
        copy.view(entry.name, kind, *layout.rows(entry, copy.owner))
        for entry in layout.entries
        for kind in KINDS
    ]


class Toy:
    """Training without a model: the state's next value depends on all ranks' present ones."""

    def __init__(self, rank, world, store, *, owners, every=1, timeout_s=20.0, one_node=False):
        self.rank, self.world, self.every, self.step, self.committed = rank, world, every, 0, -1
        self.layout = Layout(ENTRIES, owners)
        self.group = raw_group(store, "world", rank, world, CPU, timeout_s)
        keys = {"generation": 5, "rank": rank, "world": world, "buddy": 1, "pinned": False}
        keys["one_node"] = one_node
        self.snapshots = Snapshots(
            self.layout, store=store, address="127.0.0.1", timeout_s=timeout_s, **keys
        )
        self.tensors = {}
        for entry in ENTRIES:
            start, stop = self.layout.rows(entry, rank % owners)
            for number, kind in enumerate(KINDS, 1):
                size = (stop - start) * entry.row_elements
                self.tensors[entry.name, kind] = torch.linspace(
                    start, number, size, dtype=entry.dtype
                )
        self.take()

    def take(self):
        self.snapshots.take(self.step, self.step, self.tensors)

    def run_step(self, at=lambda point: None):
        """The order of Engine.run_step; `at` is called at each point."""
        at("backward")
        mean = torch.stack([t.double().mean() for t in self.tensors.values()]).sum()[None] * 0.1
        self.snapshots.ready()
        at("before_commit")
        newest = self.snapshots.newest
        self.group.allreduce([mean]).wait()
        change = mean.item()
        self.snapshots.commit()
        self.committed = newest.step
        at("pre_opt")
        self.tensors = {k: t * 0.9 + change for k, t in self.tensors.items()}
        self.step += 1
        at("post_opt")
        if self.step % self.every == 0:
            self.take()


class Torn(dict):
    """A state whose copying ends half-way, with the process."""

    def items(self):
        for number, item in enumerate(super().items()):
            if number == len(self) // 2:
                die()
            yield item


def killed(rank, world, store, point, victim, slow, one_node):
    """What a survivor holds at the end, whether it is what the owners had, and how far it was."""
    toy = Toy(rank, world, store, owners=world, one_node=one_node)
    assert (toy.snapshots._replication is None) == one_node
    plain, replication.PIECE = replication._pieces, 4096

    def pieces(copy):
        for number, piece in enumerate(plain(copy)):
            sends = copy.owner == rank and copy.tag is not None and copy.tag.step == DIES_IN
            if rank == victim and point == "mid_send" and sends and number == 2:
                die()
            if rank == slow:
                time.sleep(0.002)
            yield piece

    replication._pieces = pieces
    take = toy.take

    def recorded():
        dies = rank == victim and toy.step == DIES_IN
        store.set(f"digest/{rank}/{toy.step}", digest(toy.tensors.values()))
        if dies and point == "mid_copy":
            toy.tensors = Torn(toy.tensors)
        if dies and point == "post_copy":
            toy.snapshots._replication.send = lambda _: die()
        take()
        if dies and point == "replicated":
            toy.snapshots.ready()
            die()

    toy.take = recorded

    def at(reached):
        done = DIES_IN - 1 if reached in ("backward", "pre_opt") else DIES_IN
        if rank == victim and reached == point and toy.step == done:
            die()

    try:
        while toy.step < STEPS:
            toy.run_step(at)
        failure = ""
    except (RuntimeError, CollectiveFailed) as error:
        failure = str(error)
    toy.snapshots.close()
    toy.group = None  # the others' calls end
    whole = toy.snapshots.whole()
    digests = {}
    for copy in whole:
        if copy.tag.step:
            had = store.get(f"digest/{copy.owner}/{copy.tag.step}").decode()
            digests[copy.owner, copy.tag.step] = digest(parts(toy.layout, copy)) == had
    return [copy.holding for copy in whole], digests, toy.committed, toy.step, failure


@pytest.mark.parametrize(
    ("point", "victim", "slow", "one_node"),
    [(point, *who, False) for point in POINTS for who in ((1, None), (2, 0))]
    + [(point, 1, None, True) for point in POINTS if point not in ("post_copy", "mid_send")],
)
def test_survivors_of_a_kill_hold_every_owners_last_committed_state(point, victim, slow, one_node):
    results = run_world(WORLD, killed, point, victim, slow, one_node, dying=[victim], timeout_s=30)
    found = {rank: result for rank, result in enumerate(results) if result}
    holdings = {rank: result[0] for rank, result in found.items()}
    origin = newest_copies(holdings, {5: WORLD}, range(WORLD))
    assert origin is not None, holdings
    committed = max(result[2] for result in found.values())
    reached = max(result[3] for result in found.values())
    assert committed <= origin.step
    assert reached - origin.step <= 1  # and the step that was under way
    assert origin.updates == origin.step
    assert committed >= DIES_IN - 2 and reached < STEPS
    for _, digests, _, _, failure in found.values():
        assert failure
        assert all(digests.values()), digests


def replicas(rank, world, store):
    """Two pairs of ranks that have the same state: what each holds after two steps and a half."""
    toy = Toy(rank, world, store, owners=2)
    toy.run_step()
    toy.run_step()
    if rank in (1, 2):
        die()
    with suppress(RuntimeError):
        toy.run_step()
    toy.snapshots.close()
    toy.group = None
    return [copy.holding for copy in toy.snapshots.whole()], toy.committed


def test_replicas_send_nothing_and_cover_every_owner():
    results = run_world(4, replicas, dying=[1, 2], timeout_s=30)
    holdings = {rank: result[0] for rank, result in enumerate(results) if result}
    assert {h.owner for h in holdings[0]} == {0} and {h.owner for h in holdings[3]} == {1}
    origin = newest_copies(holdings, {5: 2}, range(4))
    assert origin.step == 2 and origin.holders == ((0,), (3,))


def every_third(rank, world, store):
    toy = Toy(rank, world, store, owners=world, every=3)
    kept = HostCopy(toy.layout, rank)
    toy.snapshots._kept = [kept]
    held = []
    for _ in range(8):
        toy.run_step()
        toy.snapshots.ready()
        held.append(sorted({h.step for h in (c.holding for c in toy.snapshots.whole())}))
    first = toy.snapshots._kept
    toy.snapshots.close()
    return held, first, toy.snapshots.newest


def test_slots_take_turns_also_when_not_every_step_is_copied():
    for held, kept, newest in run_world(2, every_third):
        assert held == [[0], [0], [0, 3], [0, 3], [0, 3], [3, 6], [3, 6], [3, 6]]
        assert kept == [] and newest == (5, 6, 6)


def alone(rank, world, store):
    toy = Toy(rank, world, store, owners=world)
    toy.run_step()
    toy.snapshots.close()
    return [copy.holding for copy in toy.snapshots.whole()], toy.snapshots.nbytes


def test_a_rank_alone_has_only_its_own_copies():
    holdings, nbytes = run_world(1, alone)[0]
    assert [(h.owner, h.step) for h in holdings] == [(0, 0), (0, 1)]
    assert nbytes == 2 * 3 * (4100 * 8 + 9 * 4)


def one_fails(rank, world, store):
    """Rank 1 fails on its own and leaves: how rank 0's wait for its copy ends."""
    toy = Toy(rank, world, store, owners=world, timeout_s=60)
    toy.run_step()
    toy.snapshots.ready()
    store.add("there", 1)
    while store.add("there", 0) < world:
        time.sleep(0.001)
    if rank == 1:
        toy.snapshots.close()
        return None
    began = time.perf_counter()
    toy.take()
    try:
        toy.snapshots.ready()
        said = ""
    except CollectiveFailed as error:
        said = str(error)
    toy.snapshots.close()
    return said, time.perf_counter() - began


def test_a_rank_that_leaves_frees_those_that_wait_for_its_copies():
    (said, seconds), _ = run_world(2, one_fails, timeout_s=30)
    assert said.startswith("replication of snapshots: ")
    assert seconds < 10  # of a time-out of 60 s


def closed_while_waiting(rank, world, store):
    """All ranks leave while each one's thread waits for the next copy: how long it took."""
    toy = Toy(rank, world, store, owners=world, timeout_s=60)
    toy.snapshots.ready()
    began = time.perf_counter()
    toy.snapshots.close()
    toy.snapshots.close()
    names = [thread.name for thread in threading.enumerate()]
    return time.perf_counter() - began, names


def test_closing_ends_threads_that_wait():
    for seconds, names in run_world(3, closed_while_waiting):
        assert seconds < 10 and names == ["MainThread"]


def test_copies_from_a_stranger_are_not_taken():
    """Only the rank that was told the token is the ward."""
    results = run_world(2, strangers)
    assert results == [[(0, 0), (0, 1), (1, 0), (1, 1)]] * 2


def strangers(rank, world, store):
    plain = replication.meet

    def meet(store, *args):
        plain(store, *args)
        address, port, _ = store.get(f"replication/{1 - rank}").decode().split()
        stranger = socket.create_connection((address, int(port)))
        stranger.sendall(bytes(4096))

    replication.meet = meet
    toy = Toy(rank, world, store, owners=world)
    toy.run_step()
    toy.snapshots.ready()
    plain(store, "all are ready", rank, world, 20)  # as a commit collective tells it
    toy.snapshots.close()
    return sorted((h.owner, h.step) for h in (c.holding for c in toy.snapshots.whole()))
