"""Snapshots of a generation: what each rank's training state was after a step, held twice.

After a step every rank copies its state to host memory and sends it to a buddy, on threads. Two
slots for the own copies and two for the ward's take turns; a slot has no tag while it is written.
On a single node nothing is sent: the buddy has the same memory (sharing.py).

Rule 1: before a rank enters a step's last collective of the whole world (a commit collective), all
snapshots that it has taken are sent and those of its ward have come (`ready`).
Rule 2: a slot is written again only after a commit collective has returned on the host since the
snapshot in the other slot was taken (`commit`). That it returned means, without any message, that
every rank's copy of that snapshot is replicated.

So, wherever ranks die, the survivors hold every owner's copy of the last committed step, or of a
newer one, unless a rank and its buddy die at once. Where ranks are replicas of one another nothing
is sent: the replicas' own copies are the second ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.distributed import Store

from flexray.actors.host_copy import HostCopy, Kind, Layout, Tag
from flexray.actors.replication import Replication
from flexray.actors.sharing import share


class Snapshots:
    """The host copies of one rank in one generation, and those kept of an older one."""

    def __init__(
        self,
        layout: Layout,
        *,
        store: Store,
        generation: int,
        rank: int,
        world: int,
        buddy: int,
        address: str,
        timeout_s: float,
        pinned: bool,
        one_node: bool = False,
        kept: Sequence[HostCopy] = (),
    ) -> None:
        """A collective call; for the other arguments see Replication.

        `one_node`: all ranks are on it.
        `kept`: whole copies of an older generation, dropped with this one's first commit.
        """
        self.generation = generation
        self._layout, self._owner, self._pinned = layout, rank % layout.owners, pinned
        self._own: list[HostCopy] = []
        self._ward: list[HostCopy] = []
        self._kept = list(kept)
        self._is_alone = world == 1  # nobody could have a use for copies
        self._taken = 0
        self._replication: Replication | None = None
        shared = None
        if one_node and 1 < world == layout.owners:
            shared = share(store, rank, world, buddy, layout, pinned=pinned)
        if shared is not None:
            self._own, self._ward = shared
        elif 1 < world == layout.owners:
            ward = (rank - buddy) % world
            self._ward = [HostCopy(layout, ward, pinned=pinned) for _ in range(2)]
            self._replication = Replication(
                store, rank, world, buddy, address, timeout_s, self._ward
            )

    @property
    def newest(self) -> Tag | None:
        """Which state the last snapshot is."""
        return self._own[(self._taken - 1) % 2].tag if self._taken else None

    @property
    def nbytes(self) -> int:
        """Host memory of all copies; of shared ones only of the own."""
        ward = self._ward if self._replication is not None else []
        return sum(copy.nbytes for copy in [*self._own, *ward, *self._kept])

    def take(
        self, step: int, updates: int, tensors: Mapping[tuple[str, Kind], torch.Tensor | None]
    ) -> None:
        """Copies this rank's state after `step` (host_copy.live_tensors) and has it sent."""
        while len(self._own) < 2:
            self._own.append(HostCopy(self._layout, self._owner, pinned=self._pinned))
        copy = self._own[self._taken % 2]
        copy.take(tensors, Tag(self.generation, step, updates))
        self._taken += 1
        if self._replication is not None:
            self._replication.send(copy)

    def ready(self) -> None:
        """Rule 1. Raises CollectiveFailed when a copy could not be sent or did not come."""
        if self._replication is not None:
            self._replication.wait(self._taken)

    def commit(self) -> None:
        """A commit collective has returned: the last snapshot is replicated everywhere."""
        if self._taken or self._is_alone:
            self._kept = []

    def whole(self) -> list[HostCopy]:
        """The copies that are whole, newest generation first."""
        return [copy for copy in self._all() if copy.tag is not None]

    def close(self) -> None:
        """Ends the replication; copies stay as they are."""
        if self._replication is not None:
            self._replication.close()
            self._replication = None

    def _all(self) -> list[HostCopy]:
        return [*self._own, *self._ward, *self._kept]
