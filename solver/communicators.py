"""Which communicators to make and to drop before a step: bookkeeping for the driver, no network.

Every rank must make and drop the same communicators in the same order (a cache that each rank
bounds by itself diverges, and one member waits for ever), so the driver alone decides. All changes
of a step are made at its start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from flexray.solver.plan import PlanningError

Ranks = tuple[int, ...]


class Change(NamedTuple):
    """Make (`create`) or drop the communicator of `ranks`; `serial` tells its lives apart."""

    create: bool
    ranks: Ranks
    serial: int


class Changes(tuple[Change, ...]):
    """The changes of one step, in the order in which every rank applies them."""

    @property
    def create(self) -> tuple[tuple[Ranks, int], ...]:
        """Communicators to make, with their serials."""
        return tuple((c.ranks, c.serial) for c in self if c.create)

    @property
    def evict(self) -> tuple[tuple[Ranks, int], ...]:
        """Communicators to drop, with their serials."""
        return tuple((c.ranks, c.serial) for c in self if not c.create)


class CommunicatorCache:
    """At most `limit_per_rank` communicators on every rank, at every moment; LRU eviction."""

    def __init__(self, limit_per_rank: int) -> None:
        if limit_per_rank < 1:
            raise PlanningError(f"a rank needs room for one communicator: limit {limit_per_rank}")
        self.limit_per_rank = limit_per_rank
        self._serials: dict[Ranks, int] = {}  # least recently used first
        self._held: Counter[int] = Counter()
        self._next_serial = 0

    def __len__(self) -> int:
        return len(self._serials)

    @property
    def ranks(self) -> tuple[Ranks, ...]:
        """Rank sets that have a communicator: what `plan_step(cached=...)` takes."""
        return tuple(self._serials)

    def serial(self, ranks: Ranks) -> int:
        """Serial of the live communicator of `ranks`. Raises KeyError if there is none."""
        return self._serials[ranks]

    def prepare(self, groups: Iterable[Ranks]) -> Changes:
        """Changes after which every group of a plan has a communicator.

        Args:
            groups: rank sets of the plan's groups, of all its micro-steps; groups of one rank
                need none. Nothing that the plan needs is dropped.

        Raises:
            PlanningError: the plan alone needs more than the limit on one rank; nothing changed.
        """
        needed = dict.fromkeys(ranks for ranks in groups if len(ranks) > 1)
        load = Counter(rank for ranks in needed for rank in ranks)
        for rank, count in load.most_common(1):
            if count > self.limit_per_rank:
                raise PlanningError(
                    f"the plan needs {count} communicators on rank {rank} and the limit is "
                    f"{self.limit_per_rank}: raise the limit"
                )
        changes: list[Change] = []
        for ranks in needed:
            if ranks in self._serials:
                self._serials[ranks] = self._serials.pop(ranks)
        for ranks in needed:
            if ranks in self._serials:
                continue
            for old in [r for r in self._serials if r not in needed]:
                full = {r for r in ranks if self._held[r] >= self.limit_per_rank}
                if full.isdisjoint(old):
                    continue
                changes.append(Change(False, old, self._serials.pop(old)))
                self._held.subtract(old)
            changes.append(Change(True, ranks, self._next_serial))
            self._serials[ranks] = self._next_serial
            self._held.update(ranks)
            self._next_serial += 1
        return Changes(changes)
