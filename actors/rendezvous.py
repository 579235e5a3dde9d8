"""How the ranks of a generation come together: they meet in the store before any group is made.

gloo's constructor waits in the store for a peer that died, and nothing can interrupt it. So ranks
first tell one another that they are there, and meanwhile look whether the driver has given this
generation up. Groups are then made with a short time-out and get that of collectives afterwards.

The store of all these functions is already under the generation's prefix.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, ProcessGroupGloo
from torch.distributed import PrefixStore, Store

INIT_TIMEOUT = timedelta(seconds=30)
START_TIMEOUT_S = 600.0  # of a meeting whose ranks may still build, from weights on a slow disk
ABANDONED = "abandoned"  # the key that the driver sets when it hears of a death


class CollectiveFailed(RuntimeError):
    """What ranks do together did not succeed: one has died, hangs or failed. One line."""


class OutOfMemory(CollectiveFailed):
    """This rank could not hold what it was given."""


def wait_for(store: Store, condition: Callable[[], bool], what: str, timeout_s: float) -> None:
    """Polls until `condition()`.

    Raises CollectiveFailed at once when this generation is given up, and after `timeout_s`.
    """
    deadline, pause = time.monotonic() + timeout_s, 0.0005
    while True:
        if store.check([ABANDONED]):
            raise CollectiveFailed(f"{what}: this generation was given up")
        if condition():
            return
        if time.monotonic() > deadline:
            raise CollectiveFailed(f"{what}: not there after {timeout_s:g} s")
        time.sleep(pause)
        pause = min(2 * pause, 0.02)


def meet(store: Store, name: str, rank: int, world: int, timeout_s: float) -> None:
    """Returns when ranks 0 to `world` - 1 have all called it with this name.

    Raises CollectiveFailed as `wait_for` does.
    """
    keys = [f"{name}/ready/{other}" for other in range(world)]
    store.set(keys[rank], "")
    wait_for(store, lambda: store.check(keys), f"{name}: rank {rank} of {world} waits", timeout_s)


def raw_group(
    store: Store, name: str, rank: int, size: int, device: torch.device, timeout_s: float
) -> ProcessGroup:
    """A group that torch.distributed does not know: use its own methods.

    `timeout_s` is that of meeting and of collectives. On gloo `Work.wait()` of a send or receive
    keeps INIT_TIMEOUT unless it is given another.
    """
    meet(store, name, rank, size, timeout_s)
    store = PrefixStore(f"{name}/group", store)
    group = ProcessGroup(store, rank, size)
    kind, backend = _backend(store, rank, size, device)
    backend._set_sequence_number_for_group()
    backend._set_default_timeout(timedelta(seconds=timeout_s))
    group._set_default_backend(kind)
    group._register_backend(device, kind, backend)
    return group


def _backend(store: Store, rank: int, size: int, device: torch.device) -> tuple[Any, Any]:
    """The kind of the backend, and the backend."""
    if device.type == "cpu":
        return ProcessGroup.BackendType.GLOO, ProcessGroupGloo(store, rank, size, INIT_TIMEOUT)
    # Not in builds of torch without CUDA.
    from torch._C._distributed_c10d import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = INIT_TIMEOUT
    return ProcessGroup.BackendType.NCCL, ProcessGroupNCCL(store, rank, size, options)


def new_group(
    ranks: list[int] | None, timeout_s: float, *, backend: str | None = None
) -> dist.ProcessGroup:
    """A group of ranks (None: all) of the default world. A collective call of the whole world."""
    group = dist.new_group(ranks, timeout=INIT_TIMEOUT, backend=backend)
    if group is not dist.GroupMember.NON_GROUP_MEMBER:
        set_timeout(group, timeout_s)
    return group


def set_timeout(group: dist.ProcessGroup | None, timeout_s: float) -> None:
    """Sets the time-out of a group's collectives (None: the default world's)."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)
