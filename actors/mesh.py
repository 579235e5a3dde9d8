"""Which ranks share parameters: all of them, or groups of consecutive ranks that are replicas."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from flexray.actors.model import ModelRefused
from flexray.actors.rendezvous import new_group


def check_shard_size(shard_size: int | None, world: int) -> None:
    """Raises ModelRefused unless groups of `shard_size` ranks make up a world of `world`."""
    if shard_size is not None and world % shard_size:
        raise ModelRefused(
            f"cluster.shard_size={shard_size} does not divide the {world} ranks of this run: "
            f"use one of {[n for n in range(1, world + 1) if world % n == 0]} or other cluster.gpus"
        )


def parameter_mesh(
    device_type: str, shard_size: int | None, *, generation: int, timeout_s: float
) -> DeviceMesh:
    """The mesh for `fully_shard` over the whole world; a collective call.

    1-D for None or the size of the world, else 2-D: (replicas, shards), where ranks that hold
    shards of one replica are consecutive and so are neighbours on a node. The generation in the
    names keeps DTensor's caches of one membership from serving another.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    check_shard_size(shard_size, world)
    if shard_size is None or shard_size == world:
        names = (f"generation{generation}",)
        return init_device_mesh(device_type, (world,), mesh_dim_names=names)
    ranks = torch.arange(world).view(-1, shard_size)
    # Every rank takes part in making every group. DeviceMesh would make them with its own time-out.
    replicas = [new_group(column, timeout_s) for column in ranks.T.tolist()]
    shards = [new_group(row, timeout_s) for row in ranks.tolist()]
    return DeviceMesh.from_group(
        [replicas[rank % shard_size], shards[rank // shard_size]],
        device_type,
        mesh=ranks,
        mesh_dim_names=(f"replicas{generation}", f"shards{generation}"),
    )
