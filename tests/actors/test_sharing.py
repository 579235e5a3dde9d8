"""Copies that a rank and its buddy share: real processes, one of which dies."""

from __future__ import annotations

import gc
import os
import signal
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from flexray.actors.host_copy import KINDS, Entry, Layout, Tag
from flexray.actors.sharing import share
from tests.worlds import run_world

ENTRIES = (Entry("wide", (41, 100), torch.float64), Entry("narrow", (9,), torch.float32))


def mapped():
    return Path("/proc/self/maps").read_text().count("memfd:flexray-host-copy")


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def state(layout, owner, value):
    return {
        (entry.name, kind): torch.full(
            ((rows[1] - rows[0]) * entry.row_elements,), value + number, dtype=entry.dtype
        )
        for entry in ENTRIES
        for rows in [layout.rows(entry, owner)]
        for number, kind in enumerate(KINDS)
    }


def dies(rank, world, store):
    """Rank 1 writes two states and dies while it writes a third; rank 2 looks at what it has."""
    layout = Layout(ENTRIES, world)
    descriptors = open_files()
    own, ward = share(store, rank, world, 1, layout, pinned=False)
    assert open_files() == descriptors
    if rank == 1:
        own[0].take(state(layout, 1, 10.0), Tag(3, 6, 5))
        own[1].take(state(layout, 1, 20.0), Tag(3, 7, 6))
        torn = state(layout, 1, 30.0)
        torn["narrow", KINDS[-1]] = torch.zeros(99)  # does not fit: the copy ends half-way
        try:
            own[0].take(torn, Tag(3, 8, 7))
        finally:
            store.set("written", "")
            os.kill(os.getpid(), signal.SIGKILL)
    store.wait(["written"], timedelta(seconds=20))
    tags, values, whole = [copy.tag for copy in ward], None, None
    if rank == 2:
        whole = ward[1]
        values = [
            whole.view(entry.name, kind, *layout.rows(entry, 1)).unique().tolist()
            for entry in ENTRIES
            for kind in KINDS
        ]
    own = ward = whole = None
    gc.collect()
    return tags, values, mapped()


def test_a_buddy_has_what_was_written_before_a_death_and_not_what_was_half_written():
    results = run_world(3, dies, dying=[1])
    tags, values, left = results[2]
    assert tags == [None, Tag(3, 7, 6)]
    assert values == [[20.0], [21.0], [22.0]] * 2
    assert results[0][0] == [None, None]  # rank 2 has written nothing
    assert left == results[0][2] == 0


def apart(rank, world, store, how):
    """One rank's memory cannot be found, or is something else."""
    layout = Layout(ENTRIES, world)
    if rank == 1 and how == "another namespace":
        os.getpid = lambda: 2**22 + 1  # no process has it
    if rank == 1 and how == "another process":
        parent = os.getppid()
        os.getpid = lambda: parent
    shared = share(store, rank, world, 1, layout, pinned=False)
    return shared is None, mapped()


@pytest.mark.parametrize("how", ["another namespace", "another process"])
def test_where_one_cannot_share_nobody_does(how):
    assert run_world(3, apart, how) == [(True, 0)] * 3
