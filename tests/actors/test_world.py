"""Entering a world after another one that a death broke off."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from flexray.actors.rendezvous import new_group
from flexray.actors.world import enter_world, leave_world
from tests.worlds import run_world


def goes_on(rank, world, store):
    """Rank 0 alone has begun to form a world whose other rank died."""
    if rank == 0:
        with pytest.raises(Exception, match=r"(?i)time"):
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore("generation1", store),
                rank=0,
                world_size=2,
                timeout=timedelta(seconds=1),
            )
        leave_world()
    enter_world(dist.PrefixStore("generation2", store), rank, world, torch.device("cpu"), 20)
    group = new_group(None, 20)  # named by a count that must be the same on all ranks
    value = torch.ones(1)
    dist.all_reduce(value, group=group)
    leave_world()
    return value.item()


def test_an_init_that_was_broken_off_does_not_spoil_the_next_world():
    assert run_world(2, goes_on) == [2.0, 2.0]
