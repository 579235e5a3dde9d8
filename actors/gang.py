"""Gangs: the ranks of a group with a live communicator, built on the fly and cached.

`new_group(use_local_synchronization=True)` hangs once ranks have made different numbers of groups,
so a gang's communicator is a raw process group (rendezvous.py) under a name of its own. Which ones
to make and to drop is the driver's decision, the same on every rank: caches that each rank bounds
by itself diverge, and one member would use a group that another has dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._C._distributed_c10d import ProcessGroup
from torch.distributed import Store

from flexray.actors.rendezvous import raw_group
from flexray.actors.timing import Stopwatch
from flexray.solver.communicators import Change


class Gang:
    """The ranks of one group. A gang of one has no communicator."""

    def __init__(
        self, ranks: Sequence[int], rank: int, group: ProcessGroup | None, watch: Stopwatch
    ) -> None:
        self.ranks = tuple(ranks)
        self.degree = len(ranks)
        self.rank = self.ranks.index(rank)
        self.group = group
        self.watch = watch

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """Equal-split all-to-all over dim 0 of x [degree, ...]; timed."""
        assert self.group is not None
        x = x.contiguous()
        out = torch.empty_like(x)
        with self.watch.span("all_to_all"):
            # The group's own method: torch.distributed's wrapper hides the real error of a group
            # that is not registered with it.
            self.group.alltoall_base(out, x, [], []).wait()
        return out


class GangCache:
    """The communicators of one rank in one generation, made and dropped as the driver says."""

    def __init__(
        self, rank: int, store: Store, device: torch.device, timeout_s: float, watch: Stopwatch
    ) -> None:
        """`store`: already under the generation's prefix."""
        self._rank = rank
        self._store = store
        self._device = device
        self._timeout_s = timeout_s
        self._watch = watch
        self._gangs: dict[tuple[int, ...], Gang] = {}

    def __len__(self) -> int:
        return len(self._gangs)

    def apply(self, changes: Sequence[Change]) -> int:
        """Makes and drops communicators in the driver's order; returns how many were made here."""
        made = 0
        for change in changes:
            if self._rank not in change.ranks:
                continue
            if change.create:
                self._gangs[change.ranks] = self._make(change.ranks, change.serial)
                made += 1
            else:
                self._drop(self._gangs.pop(change.ranks))
        return made

    def get(self, ranks: Sequence[int]) -> Gang:
        """The gang of `ranks`. Raises KeyError if the driver never had it made."""
        ranks = tuple(ranks)
        if len(ranks) == 1:
            return Gang(ranks, self._rank, None, self._watch)
        return self._gangs[ranks]

    def clear(self) -> None:
        """Drops every communicator, also those whose members have died."""
        self.abort()
        while self._gangs:
            self._gangs.popitem()[1].group = None

    def abort(self) -> None:
        """Makes what waits in NCCL's communicators fail; gloo's wait until the peers are gone."""
        if self._device.type == "cuda":
            for gang in list(self._gangs.values()):
                assert gang.group is not None
                gang.group._get_backend(self._device).abort()

    def _make(self, ranks: tuple[int, ...], serial: int) -> Gang:
        name = f"gang/{'-'.join(map(str, ranks))}/{serial}"
        rank, size = ranks.index(self._rank), len(ranks)
        group = raw_group(self._store, name, rank, size, self._device, self._timeout_s)
        # NCCL connects lazily: pay for it now, not inside the first attention.
        warm = torch.zeros(size, device=self._device)
        group.alltoall_base(torch.empty_like(warm), warm, [], []).wait()
        return Gang(ranks, self._rank, group, self._watch)

    def _drop(self, gang: Gang) -> None:
        if self._device.type == "cuda" and gang.group is not None:
            torch.cuda.synchronize(self._device)
            gang.group._get_backend(self._device).shutdown()
        gang.group = None
