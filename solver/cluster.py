"""The GPUs that a plan may use: nodes of any sizes, ranks numbered node by node."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flexray.solver.plan import PlanningError


@dataclass(frozen=True)
class Cluster:
    """Nodes and their GPUs.

    Attributes:
        node_sizes: GPUs of each node; rank 0 is the first GPU of the first node.
        speeds: one factor per rank, 1.0 as the cost model says, 0.5 half as fast; empty
            means that all are 1. A group is as slow as its slowest rank.
    """

    node_sizes: tuple[int, ...]
    speeds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.gpus == 0 or min(self.node_sizes) < 1:
            raise PlanningError(
                f"a cluster needs at least one GPU and no empty node: node sizes {self.node_sizes}"
            )
        if self.speeds and len(self.speeds) != self.gpus:
            raise PlanningError(f"{len(self.speeds)} speed factors for {self.gpus} ranks")
        for rank, speed in enumerate(self.speeds):
            if not (math.isfinite(speed) and speed > 0):
                raise PlanningError(f"speed factor of rank {rank} is {speed}: it must be above 0")

    @classmethod
    def uniform(cls, gpus: int, gpus_per_node: int = 8) -> Cluster:
        """`gpus` GPUs on nodes of `gpus_per_node`; the last node has what is left."""
        if gpus < 1 or gpus_per_node < 1:
            raise PlanningError(
                f"a cluster needs at least one GPU and one per node: {gpus} GPUs, "
                f"{gpus_per_node} per node"
            )
        full, rest = divmod(gpus, gpus_per_node)
        return cls((gpus_per_node,) * full + ((rest,) if rest else ()))

    @property
    def gpus(self) -> int:
        """Number of ranks."""
        return sum(self.node_sizes)

    @property
    def largest_node(self) -> int:
        """A group of at most this degree lies inside one node."""
        return max(self.node_sizes)

    @property
    def speed(self) -> tuple[float, ...]:
        """Speed factor of each rank, `(gpus,)`."""
        return self.speeds or (1.0,) * self.gpus

    @property
    def node_of(self) -> tuple[int, ...]:
        """Node of each rank, `(gpus,)`."""
        return tuple(node for node, size in enumerate(self.node_sizes) for _ in range(size))
