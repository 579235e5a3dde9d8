"""Who sends what when owners change: every row arrives once, from somebody who has it."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexray.actors.host_copy import KINDS, Entry, Layout
from flexray.actors.transfers import appointed, transfers

DTYPES = (torch.float32, torch.float64, torch.bfloat16)


@st.composite
def shapes(draw):
    return tuple(draw(st.lists(st.integers(0, 17), max_size=3)))


@st.composite
def changes(draw):
    """Entries, old owners, new owners, new world, and who holds which copy, leavers included."""
    entries = tuple(
        Entry(str(i), draw(shapes()), draw(st.sampled_from(DTYPES)))
        for i in range(draw(st.integers(1, 4)))
    )
    old, new, replicas = (draw(st.integers(1, n)) for n in (8, 8, 3))
    world = new * replicas
    participants = st.integers(0, world - 1 + draw(st.integers(0, 4)))
    holders = [
        draw(st.lists(participants, min_size=1, max_size=3, unique=True)) for _ in range(old)
    ]
    return Layout(entries, old), Layout(entries, new), world, holders


def size_of(entry):
    return len(KINDS) * entry.dtype.itemsize


@given(changes(), st.integers(24, 2000))
def test_every_row_arrives_once_from_a_holder_within_bounded_rounds(change, limit):
    old, new, world, holders = change
    arrived = Counter()
    sent, received = Counter(), Counter()
    last = Counter()
    for move in transfers(old, new, world, holders, limit):
        entry = old.entries[move.entry]
        first, end = (row * entry.row_elements for row in old.rows(entry, move.owner))
        assert first <= move.start < move.stop <= end, "in the owner's copy"
        assert move.sender in holders[move.owner]
        if move.receiver in holders[move.owner]:
            assert move.sender == move.receiver, "what one has is not sent"
        arrived.update((move.receiver, move.entry, i) for i in range(move.start, move.stop))
        if move.sender != move.receiver:
            sent[move.sender, move.round] += (move.stop - move.start) * size_of(entry)
            received[move.receiver, move.round] += (move.stop - move.start) * size_of(entry)
            for side in (("sends", move.sender), ("receives", move.receiver)):
                assert last[side] <= move.round
                last[side] = move.round
    wanted = Counter(
        (rank, number, i)
        for rank in range(world)
        for number, entry in enumerate(new.entries)
        for i in range(*(row * entry.row_elements for row in new.rows(entry, rank % new.owners)))
    )
    assert arrived == wanted
    assert max([*sent.values(), *received.values()], default=0) <= limit


def test_a_scalar_and_a_parameter_without_elements():
    entries = (Entry("scalar", (), torch.float32), Entry("none", (3, 0), torch.float32))
    moves = list(transfers(Layout(entries, 2), Layout(entries, 3), 3, [(1,), (1,)], 100))
    assert moves == [(0, 0, 0, 1, 0, 0, 1)]


def test_holders_share_the_work_and_rounds_are_full():
    entries = tuple(Entry(str(i), (48, 16), torch.float32) for i in range(32))
    holders = [(2, 3), (3, 4), (4, 5), (5, 2)]  # none of them stays
    sent, received, rounds, limit = Counter(), Counter(), 0, 20_000
    for move in transfers(Layout(entries, 4), Layout(entries, 2), 2, holders, limit):
        size = (move.stop - move.start) * 12
        sent[move.sender] += size
        received[move.receiver] += size
        rounds = max(rounds, move.round + 1)
    assert len(sent) == 4 and max(sent.values()) <= 1.1 * min(sent.values())
    assert rounds <= 1.1 * max(received.values()) / limit + 1


def test_rows_that_nobody_has_are_an_error():
    entries = (Entry("weight", (8,), torch.float32),)
    with pytest.raises(ValueError, match="nobody has the copy of owner 1: weight"):
        list(transfers(Layout(entries, 2), Layout(entries, 1), 1, [(0,), ()], 100))
    with pytest.raises(ValueError, match="nobody has the copy of owner 1"):
        appointed([(0,), ()])


@given(st.lists(st.sets(st.integers(0, 7), min_size=1), min_size=1, max_size=8))
def test_each_copy_is_checked_by_one_holder(holders):
    chosen = appointed(holders)
    assert all(holder in own for holder, own in zip(chosen, holders, strict=True))


def test_checks_of_copies_with_buddies_are_spread():
    assert sorted(appointed([(k, (k + 1) % 5) for k in range(5)])) == [0, 1, 2, 3, 4]
