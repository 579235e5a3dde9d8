"""Ranks meet before they make a group, and nothing of a given-up generation waits."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from flexray.actors.rendezvous import CollectiveFailed, meet, raw_group
from tests.worlds import run_world

CPU = torch.device("cpu")


@pytest.fixture
def driver():
    """The driver's store."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def client(driver):
    return dist.PrefixStore(
        "generation4",
        dist.TCPStore("127.0.0.1", driver.port, is_master=False, timeout=timedelta(seconds=30)),
    )


def test_an_abandoned_generation_frees_who_waits_at_once(driver):
    waited = []

    def wait():
        began = time.perf_counter()
        with pytest.raises(CollectiveFailed, match=r"gang/0-1: rank 0 of 2 .* given up"):
            meet(client(driver), "gang/0-1", 0, 2, 60)
        waited.append(time.perf_counter() - began)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.3)
    assert thread.is_alive()
    driver.set("generation4/abandoned", "")
    thread.join(20)
    assert waited and waited[0] < 20


def test_nobody_meets_in_an_abandoned_generation(driver):
    """Also when all have come: one of them may be the one that died."""
    driver.set("generation4/abandoned", "")
    store = client(driver)
    store.set("world/ready/1", "")
    with pytest.raises(CollectiveFailed, match="given up"):
        meet(store, "world", 0, 2, 60)
    driver.set("generation5/world/ready/1", "")
    meet(dist.PrefixStore("generation5", driver), "world", 0, 2, 60)


def test_a_rank_that_does_not_come_is_waited_for_as_long_as_said(driver):
    with pytest.raises(CollectiveFailed, match=r"world: rank 1 of 2 waits: not there after 0\.2 s"):
        meet(client(driver), "world", 1, 2, 0.2)


def late(rank, world, store):
    """Rank 1 takes no part in a collective of a group whose time-out is 1 s."""
    group = raw_group(store, "pair", rank, world, CPU, 1.0)
    group.allreduce([torch.zeros(1)]).wait()
    if rank == 1:
        time.sleep(4)
        return None
    began = time.perf_counter()
    with pytest.raises(RuntimeError):
        group.allreduce([torch.zeros(1)]).wait()
    return time.perf_counter() - began


def test_a_group_gets_the_time_out_of_collectives_once_it_is_there():
    waited, _ = run_world(2, late)
    assert 0.5 < waited < 4
