"""One batch to plan, as arrays: checked lengths, their cost in each option, where groups go."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from flexray.solver import kernels
from flexray.solver.cluster import Cluster
from flexray.solver.cost import CostModel, Option
from flexray.solver.plan import Dropped, PlanningError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Problem:
    """K sequences, longest first, and J options, ascending by degree.

    Attributes:
        rows: positions in the batch, (K,).
        lengths: tokens, descending, (K,).
        dropped: zero-length rows.
    """

    rows: Ints
    lengths: Ints
    options: tuple[Option, ...]
    cluster: Cluster
    micro_step_ms: float
    dropped: tuple[Dropped, ...]

    @classmethod
    def of(
        cls, lengths: Sequence[int], cost: CostModel, cluster: Cluster, degrees: Iterable[int]
    ) -> Problem:
        """Checks the batch and sorts it.

        Raises:
            PlanningError: a negative length, no legal degree, or a row that no group holds.
        """
        options = cost.options(cluster, degrees)
        given = np.asarray(lengths)
        if len(given) and given.dtype.kind not in "iu":
            raise PlanningError(f"lengths must be whole numbers of tokens: got {given.dtype}")
        given = given.astype(np.int64)
        if len(given) and given.min() < 0:
            row = int(np.argmax(given < 0))
            raise PlanningError(f"row {row} has length {given[row]}: lengths must be 0 or more")
        most = max(o.capacity for o in options)
        if len(given) and given.max() > most:
            row = int(np.argmax(given > most))
            over = int((given > most).sum()) - 1
            raise PlanningError(
                f"row {row} has length {given[row]} and the largest group holds {most} tokens"
                + (f" ({over} more rows are too long)" if over else "")
                + ": use more GPUs or more memory per GPU, allow a larger degree, or limit the "
                "length of rows (max_length)"
            )
        rows = np.flatnonzero(given > 0)
        rows = rows[np.argsort(-given[rows], kind="stable")]
        dropped = tuple(Dropped(int(row), 0, "zero length") for row in np.flatnonzero(given == 0))
        return cls(rows, given[rows], options, cluster, float(cost.micro_step_ms), dropped)

    @cached_property
    def degrees(self) -> Ints:
        """Degree of each option, (J,)."""
        return np.array([o.degree for o in self.options], np.int64)

    @cached_property
    def capacity(self) -> Ints:
        """Tokens that a group of each option holds, (J,)."""
        return np.array([o.capacity for o in self.options], np.int64)

    @cached_property
    def fixed(self) -> Floats:
        """Fixed ms of a group of each option, (J,)."""
        return np.array([o.fixed for o in self.options])

    @cached_property
    def time(self) -> Floats:
        """ms of each sequence in a group of each option, inf where it does not fit, (K, J)."""
        s = self.lengths.astype(np.float64)[:, None]
        quadratic, linear, each = (
            np.array([getattr(o, name) for o in self.options])
            for name in ("quadratic", "linear", "per_sequence")
        )
        time: Floats = quadratic * s * s + linear * s + each
        return np.where(self.lengths[:, None] <= self.capacity, time, np.inf)

    @cached_property
    def work(self) -> Floats:
        """GPU time: time x degree, (K, J)."""
        return self.time * self.degrees

    @cached_property
    def monotone(self) -> bool:
        """Whether a larger degree never costs a sequence less GPU time."""
        finite = np.where(np.isinf(self.work), -1.0, self.work)
        return bool(np.all((np.diff(finite, axis=1) >= 0) | (finite[:, :-1] < 0)))

    @cached_property
    def power(self) -> float:
        """Sum of the ranks' speeds: GPU ms of work that a ms can hold."""
        return math.fsum(self.cluster.speed)

    @cached_property
    def fewest_micro_steps(self) -> int:
        """No plan has fewer: the cluster's memory."""
        per_gpu = max(o.capacity // o.degree for o in self.options)
        return math.ceil(int(self.lengths.sum()) / (per_gpu * self.cluster.gpus))

    @cached_property
    def machine(self) -> tuple[Any, ...]:
        """The cluster as the kernels take it: see `kernels.layout`."""
        cluster = self.cluster
        sizes = np.array(cluster.node_sizes, np.int64)
        node_of = np.array(cluster.node_of, np.int64)
        speed = np.array(cluster.speed)
        order = np.lexsort((-speed, node_of, sizes[node_of]))
        node = cluster.largest_node
        simple = (
            len(set(cluster.speed)) == 1
            and cluster.speed[0] == 1
            and (
                len(sizes) == 1
                or (
                    len(set(cluster.node_sizes)) == 1
                    and all(d % node == 0 or node % d == 0 for d in self.degrees)
                    and all(b % a == 0 for a, b in pairwise(self.degrees))
                )
            )
        )
        return simple, sizes, node_of, order.astype(np.int64), 1.0 / speed, node

    def has_room(self, counts: Ints) -> bool:
        """Whether these groups, (J,) of each option, fit into one micro-step."""
        if self.machine[0]:
            return bool(counts @ self.degrees <= self.cluster.gpus)
        return self._place(np.repeat(self.degrees, counts)[::-1].tolist(), {}) is not None

    def place(
        self, degrees: Sequence[int], cached: Collection[tuple[int, ...]] = ()
    ) -> list[tuple[int, ...]] | None:
        """Ranks for the groups of one micro-step, in the order of `degrees` (descending).

        Rank sets in `cached` (those that have a communicator) are taken first where all ranks
        are equally fast and the others still find room. None if the groups don't fit.
        """
        if cached and len(set(self.cluster.speed)) == 1:
            reused = self._place(degrees, self._reusable(degrees, cached))
            if reused is not None:
                return reused
        return self._place(degrees, {})

    def _reusable(
        self, degrees: Sequence[int], cached: Collection[tuple[int, ...]]
    ) -> dict[int, tuple[int, ...]]:
        chosen: dict[int, tuple[int, ...]] = {}
        used: set[int] = set()
        node_of, largest = self.cluster.node_of, self.cluster.largest_node
        cached = [
            ranks
            for ranks in sorted(cached)
            if ranks[-1] < self.cluster.gpus
            and (len(ranks) > largest or node_of[ranks[0]] == node_of[ranks[-1]])
        ]
        for g, degree in enumerate(degrees):
            for ranks in cached if degree > 1 else ():
                if len(ranks) == degree and used.isdisjoint(ranks):
                    chosen[g] = ranks
                    used.update(ranks)
                    break
        return chosen

    def _place(
        self, degrees: Sequence[int], chosen: dict[int, tuple[int, ...]]
    ) -> list[tuple[int, ...]] | None:
        _, sizes, node_of, order, _, largest = self.machine
        owner = np.full(self.cluster.gpus, -1, np.int64)
        free = sizes.copy()
        for ranks in chosen.values():
            for rank in ranks:
                owner[rank] = -2
                free[node_of[rank]] -= 1
        rest = [g for g in range(len(degrees)) if g not in chosen]
        want = np.array([degrees[g] for g in rest], np.int64)
        if not kernels.place(want, free, node_of, len(sizes), largest, order, owner):
            return None
        placed = dict(chosen)
        for i, g in enumerate(rest):
            placed[g] = tuple(int(r) for r in np.flatnonzero(owner == i))
        return [placed[g] for g in range(len(degrees))]
