"""Entering and leaving the default world: whoever leaves closes every socket of its generation."""

from __future__ import annotations

import gc

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, _redistribute
from torch.distributed.tensor._collective_utils import MeshTopoInfo
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from flexray.actors.rendezvous import INIT_TIMEOUT, meet, set_timeout


def enter_world(
    store: dist.Store, rank: int, world: int, device: torch.device, timeout_s: float
) -> None:
    """Makes the default group. `store` is under the generation's prefix.

    Raises CollectiveFailed when a rank does not come.
    """
    meet(store, "world", rank, world, timeout_s)
    # Groups are named by this count, alike on all ranks. An init that a death broke off, here and
    # not elsewhere, has counted on, and nothing else sets it back.
    dist.distributed_c10d._world.group_count = 0
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=INIT_TIMEOUT)
    set_timeout(None, timeout_s)


def leave_world() -> None:
    """Drops all groups that torch.distributed knows, and what keeps them alive.

    gloo's sockets are closed, and so the neighbours' calls end, once nothing refers to a group; its
    own shutdown frees nobody. NCCL's are aborted. Whatever the caller still has of this generation
    (a DTensor, a mesh, a Work, a traceback) pins its sockets.
    """
    _clear_caches()
    if dist.is_initialized():
        if dist.get_backend() == "nccl":
            dist.distributed_c10d._abort_process_group()
        else:
            dist.destroy_process_group()
    gc.collect()


def _clear_caches() -> None:
    """DTensor's caches. They take meshes of equal ranks for equal and ignore which rank is one's
    own: a process that has another rank in the next world would load another rank's rows."""
    MeshTopoInfo.build_from_mesh.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _clear_sharding_prop_cache()
    propagator = type(DTensor._op_dispatcher.sharding_propagator)
    propagator._propagate_tensor_meta_cached.cache_clear()
    FakeTensorMode.cache_clear()  # has entries for every mesh that ever was
