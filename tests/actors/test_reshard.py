"""The training state moves to other owners bit by bit, from host copies and in bounded memory."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore
from torch.distributed.distributed_c10d import ProcessGroupGloo

from flexray.actors.host_copy import (
    KINDS,
    Entry,
    HostCopy,
    Layout,
    Tag,
    entries_of,
    live_tensors,
    tensors_to_restore,
)
from flexray.actors.lora import Lora
from flexray.actors.reshard import CorruptState, restore
from flexray.actors.seat import Copies
from flexray.solver.communicators import CommunicatorCache
from tests.actors.models import config, engine, label_tokens, sequences, work_of
from tests.actors.test_checkpoint import whole_state
from tests.worlds import run_world

ENTRIES = (
    Entry("wide", (17, 13), torch.float32),
    Entry("double", (5, 2, 3), torch.float64),
    Entry("scalar", (), torch.float64),
    Entry("few", (2,), torch.float32),
    Entry("none", (0, 4), torch.float32),
    Entry("half", (31, 3), torch.bfloat16),
    Entry("long", (1001,), torch.float32),
)


def group_of(store, name, rank, size):
    return ProcessGroupGloo(PrefixStore(name, store), rank, size, timedelta(seconds=30))


def whole(entry, kind):
    """The value of a whole parameter or moment, flat."""
    random = torch.Generator().manual_seed(10 * entry.rows + KINDS.index(kind))
    values = torch.randn(entry.rows * entry.row_elements, generator=random)
    values[::7] = -0.0
    values[3::11] = torch.nan
    return values.to(entry.dtype)


def rows(layout, entry, owner):
    first, end = layout.rows(entry, owner)
    return slice(first * entry.row_elements, end * entry.row_elements)


def copies_of(entries, origin, rank):
    """The host copies that a participant has."""
    layout, copies = Layout(entries, origin.owners), {}
    for owner, holders in enumerate(origin.holders):
        if rank in holders:
            copies[owner] = HostCopy(layout, owner)
            copies[owner].take(
                {(e.name, k): whole(e, k)[rows(layout, e, owner)] for e in entries for k in KINDS},
                Tag(origin.generation, origin.step, origin.updates),
            )
    return copies


def tensors_of(entries, owners, rank):
    """The tensors of a member, which hold something else yet."""
    layout = Layout(entries, owners)
    return {
        (e.name, k): torch.full_like(whole(e, k)[rows(layout, e, rank % owners)], 77)
        for e in entries
        for k in KINDS
    }


def move(rank, participants, store, origin, world, owners, staging, group=None):
    """A re-shard of ENTRIES: what moved, or what went wrong."""
    copies = copies_of(ENTRIES, origin, rank)
    tensors = tensors_of(ENTRIES, owners, rank) if rank < world else {}
    group = group_of(store, "move", rank, participants)
    moved = restore(
        copies,
        tensors,
        ENTRIES,
        origin,
        group=group,
        rank=rank,
        world=world,
        owners=owners,
        staging=staging,
    )
    layout = Layout(ENTRIES, owners)
    for (name, kind), found in tensors.items():
        entry = next(e for e in ENTRIES if e.name == name)
        right = whole(entry, kind)[rows(layout, entry, rank % owners)]
        assert torch.equal(found.view(torch.uint8), right.view(torch.uint8)), (name, kind)
    return moved, sum(tensor.nbytes for tensor in tensors.values())


def buddies(owners, *, without=(), numbers=None):
    """Holders where owner k's copies are with ranks k and k + 1, of whom some are dead."""
    numbers = numbers or [k for k in range(owners) if k not in without]
    held = [[k for k in (k, (k + 1) % owners) if k not in without] for k in range(owners)]
    return tuple(tuple(numbers.index(k) for k in own) for own in held)


@pytest.mark.parametrize(
    ("holders", "world", "participants", "owners"),
    [
        (buddies(4, without=(2,)), 3, 3, 3),  # one has died
        (buddies(3), 5, 5, 5),  # two have joined
        (buddies(4), 1, 4, 1),  # three leave
        (((0,),), 4, 4, 4),
        (buddies(4), 4, 4, 4),  # ranks that stay have all they need
        (((2, 3), (3, 4), (4, 2)), 2, 5, 2),  # all that have copies leave
        (((0, 2), (1, 3)), 6, 6, 2),  # replicas
        (((0, 2), (1, 3)), 4, 4, 4),
        (buddies(3), 6, 6, 3),
    ],
)
@pytest.mark.parametrize("staging", [200, 1 << 20])
def test_every_rank_gets_its_rows(holders, world, participants, owners, staging):
    origin = Copies(1, 5, len(holders), 5, holders)
    results = run_world(participants, move, origin, world, owners, staging)
    assert sum(m.sent for m, _ in results) == sum(m.received for m, _ in results)
    for rank, (moved, own) in enumerate(results):
        assert moved.received + moved.local == own
        assert (own > 0) == (rank < world)
    if holders == buddies(4) and world == 4:
        assert all(moved.received == 0 for moved, _ in results)


class Corrupting:
    """A group in which what one participant receives first is changed when it arrives."""

    def __init__(self, group, change):
        self._group, self._change = group, change

    def __getattr__(self, name):
        return getattr(self._group, name)

    def recv(self, tensors, peer, tag):
        work = self._group.recv(tensors, peer, tag)
        change, self._change = self._change, None
        return Changed(work, change, tensors[0]) if change else work


class Changed:
    """A message that is changed when it has arrived."""

    def __init__(self, work, change, message):
        self._work, self._change, self._message = work, change, message

    def wait(self, timeout):
        self._work.wait(timeout)
        self._change(self._message)


def flip_a_bit(message):
    message[17] ^= 4


def swap_two_rows(message):
    """Of "wide", whose rows of the parameter itself come first."""
    two = message[: 2 * 13 * 4].view(2, -1)
    two.copy_(two.flip(0).clone())


def corrupted(rank, participants, store, origin, world, owners, staging, where, change):
    group = group_of(store, "corrupted", rank, participants)
    if rank == where:
        group = Corrupting(group, change)
    tensors = tensors_of(ENTRIES, owners, rank) if rank < world else {}
    try:
        restore(
            copies_of(ENTRIES, origin, rank),
            tensors,
            ENTRIES,
            origin,
            group=group,
            rank=rank,
            world=world,
            owners=owners,
            staging=staging,
        )
    except CorruptState as error:
        return str(error)


@pytest.mark.parametrize("change", [flip_a_bit, swap_two_rows])
@pytest.mark.parametrize(
    ("holders", "world", "owners", "where"),
    [
        (((2, 3), (3, 4), (4, 2)), 2, 2, 0),  # leavers are told, too
        (((0,), (0,)), 4, 2, 3),  # a replica that is not the first
    ],
)
def test_what_changes_on_the_way_is_found_on_every_participant(
    change, holders, world, owners, where
):
    origin = Copies(1, 5, len(holders), 5, holders)
    participants = max(world, *(p + 1 for own in holders for p in own))
    said = run_world(participants, corrupted, origin, world, owners, 4096, where, change)
    assert len(set(said)) == 1
    assert re.fullmatch(r"step 5: wide \(parameter\) after the re-shard is not what .*", said[0])


def memory(rank, participants, store, origin, world, staging):
    """Bytes by which resident memory grew at most during a re-shard, and those that moved."""
    group = group_of(store, "memory", rank, participants)
    for number in (16, 8192):  # the first one loads code
        entries = (Entry("matrix", (number, 1024), torch.float32),)
        copies = copies_of(entries, origin, rank)
        tensors = tensors_of(entries, world, rank) if rank < world else {}
        resident_peak()
        before = resident_peak()
        moved = restore(
            copies,
            tensors,
            entries,
            origin,
            group=group,
            rank=rank,
            world=world,
            owners=world,
            staging=staging,
        )
    return resident_peak() - before, moved.sent + moved.received


def resident_peak():
    """Resident memory in bytes at its highest since the last call."""
    status = Path("/proc/self/status").read_text()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is resident
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024


def test_memory_beside_rows_and_copies_is_bounded():
    origin = Copies(1, 5, 3, 5, ((2,), (3,), (4,)))  # two ranks without copies, three leavers
    for grown, moved in run_world(5, memory, origin, 2, 1 << 20):
        assert moved > 30 << 20
        assert grown < 8 << 20


MODELS = {
    # 4 rows of a head's norm, 211 of the vocabulary: some ranks hold none, some one less.
    "tied": (config("qwen3", head_dim=4, tie_word_embeddings=True), {}),
    "untied": (config("qwen3", head_dim=4), {}),
    "adapters": (config("qwen3", head_dim=4), {"lora": Lora(rank=3, alpha=6.0)}),
}
BATCH = sequences([40, 9, 23, 5, 17, 31, 2, 60])


def train(ours, communicators, step):
    """One step in which every rank has some of the batch's sequences for itself."""
    groups = [((r,), tuple(range(r, len(BATCH), ours.world))) for r in range(ours.world)]
    total = label_tokens(BATCH)
    return ours.run_step(
        work_of(ours.rank, [groups], total, communicators, step, ours.generation)
    ).loss


def hold(ours, generation, step):
    """Copies of all owners on every rank; which of them count is up to the test."""
    layout = Layout(entries_of(ours.model), ours.settings.shard_size or ours.world)
    copies = {owner: HostCopy(layout, owner) for owner in range(layout.owners)}
    own = copies.get(ours.rank)
    if own:
        own.take(live_tensors(ours.model, ours.optimizer), Tag(generation, step, step))
    for owner, copy in copies.items():
        for buffer in copy.buffers.values():
            dist.broadcast(buffer, owner)
    return copies


def generations(pid, processes, store, schedule, hf_config, settings):
    """Trains through `schedule`; the losses, and the whole states before and after each re-shard.

    schedule: (members, shard_size, holders of each older owner's copy, steps), processes by number.
    """
    copies, entries, done, losses, states = {}, (), 0, [], []
    for generation, (members, shard_size, holders, steps) in enumerate(schedule):
        leavers = sorted({p for own in holders for p in own} - set(members))
        participants = [*members, *leavers]
        if pid in participants:
            own = PrefixStore(str(generation), store)
            rank, world, ours, tensors = participants.index(pid), len(members), None, {}
            if pid in members:
                keys = {"dtype": "float64", "shard_size": shard_size, **settings}
                ours = engine(rank, world, own, BATCH, hf_config, generation, **keys)
                entries = entries_of(ours.model)
            if holders:
                numbers = tuple(tuple(participants.index(p) for p in own) for own in holders)
                origin = Copies(generation - 1, done, len(holders), done, numbers)
                if ours:
                    tensors = tensors_to_restore(ours.model, ours.optimizer, origin.updates)
                    for tensor in tensors.values():
                        tensor.fill_(torch.nan)
                restore(
                    {owner: copies[owner] for owner, who in enumerate(holders) if pid in who},
                    tensors,
                    entries,
                    origin,
                    group=group_of(own, "restore", rank, len(participants)),
                    rank=rank,
                    world=world,
                    owners=shard_size or world,
                    staging=4096,
                )
            if ours:
                ours.set_counters({"updates": done})
                before, communicators = whole_state(ours), CommunicatorCache(16)
                losses += [train(ours, communicators, done + i + 1) for i in range(steps)]
                states.append((generation, before, whole_state(ours)))
                copies = hold(ours, generation, done + steps)
                dist.barrier()
                ours.leave()
        done += steps
    return losses, states


# By generation: members, shard_size, who has the copies of the older owners, steps.
SCHEDULES = {
    "4-3-5-4": [
        ((0, 1, 2, 3), None, (), 2),
        ((0, 1, 3), None, ((0, 1), (1,), (3,), (3, 0)), 1),  # 2 has died
        ((3, 0, 1, 4, 5), None, ((0, 1), (1, 3), (3, 0)), 1),
        ((0, 3, 4, 5), None, ((3, 0), (0, 1), (1, 4), (4, 5), (5, 3)), 2),  # 1 leaves
    ],
    "1-4-1": [
        ((0,), None, (), 1),
        ((1, 2, 3, 0), None, ((0,),), 1),
        ((2,), None, ((1,), (2, 3), (3, 0), (0,)), 1),  # three leave and serve
    ],
    "swap": [((0, 1), None, (), 1), ((1, 0), None, ((0, 1), (1, 0)), 1)],
    "pairs": [
        ((0, 1, 2, 3), 2, (), 1),
        ((0, 1, 2, 3, 4, 5), 2, ((0, 2), (1, 3)), 1),
        ((3, 5), 2, ((0, 2, 4), (1, 3, 5)), 1),
        ((3, 5, 0), None, ((3,), (5,)), 1),
    ],
}


@pytest.mark.parametrize(
    ("schedule", "model", "dtype"),
    [
        ("4-3-5-4", "tied", "float64"),
        ("4-3-5-4", "untied", "float32"),
        ("4-3-5-4", "adapters", "float64"),
        ("1-4-1", "untied", "float64"),
        ("swap", "tied", "float64"),
        ("pairs", "tied", "float64"),
        ("pairs", "adapters", "float32"),
    ],
)
def test_training_goes_on_as_if_nothing_had_happened(schedule, model, dtype):
    plan = SCHEDULES[schedule]
    hf_config, settings = MODELS[model]
    settings = {"dtype": dtype, **settings}
    processes = 1 + max(p for members, *_ in plan for p in members)
    results = run_world(processes, generations, plan, hf_config, settings)
    last = None
    for generation, (members, *_) in enumerate(plan):
        found = [
            (before, after)
            for pid in members
            for number, before, after in results[pid][1]
            if number == generation
        ]
        assert len(found) == len(members)
        for before, after in found:
            same(before, last or before)
            same(after, found[0][1])
        last = found[0][1]
    steps = sum(steps for *_, steps in plan)
    undisturbed = [((0, 1), None, (), steps)]
    right = run_world(2, generations, undisturbed, hf_config, settings)[0][0]
    tolerance = {"float64": 1e-12, "float32": 1e-5}[dtype]
    done = 0
    for generation, (members, *_, steps) in enumerate(plan):
        for pid in members:
            mine = [g for g, (own, *_) in enumerate(plan) if pid in own]
            skip = sum(plan[g][-1] for g in mine[: mine.index(generation)])
            losses = results[pid][0][skip : skip + steps]
            assert losses == pytest.approx(right[done : done + steps], rel=tolerance)
        done += steps


def same(found, right):
    """Bit for bit: parameters, moments and counts of steps."""
    assert found.keys() == right.keys()
    for key in right:
        assert found[key].tobytes() == right[key].tobytes(), key
