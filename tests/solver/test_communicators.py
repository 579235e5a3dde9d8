"""The driver's bookkeeping: bounded on every rank at every moment, nothing needed is dropped."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from flexray.solver.communicators import CommunicatorCache
from flexray.solver.plan import PlanningError


def random_groups(rng: np.random.Generator, ranks: int) -> list[tuple[int, ...]]:
    groups = []
    for _ in range(int(rng.integers(1, 3))):
        order, at = rng.permutation(ranks).tolist(), 0
        while at < ranks:
            size = min(int(rng.integers(1, 5)), ranks - at)
            groups.append(tuple(sorted(order[at : at + size])))
            at += size
    return groups


def test_a_thousand_random_plans_stay_bounded_and_serials_are_unique() -> None:
    rng = np.random.default_rng(0)
    cache = CommunicatorCache(limit_per_rank=3)
    live: dict[tuple[int, ...], int] = {}
    serials: set[int] = set()
    for _ in range(1000):
        groups = random_groups(rng, 8)
        for change in cache.prepare(groups):
            if change.create:
                assert change.ranks not in live and change.serial not in serials
                live[change.ranks] = change.serial
                serials.add(change.serial)
                held = Counter(rank for ranks in live for rank in ranks)
                assert max(held.values()) <= 3
            else:
                assert live.pop(change.ranks) == change.serial
        for ranks in groups:
            if len(ranks) > 1:
                assert cache.serial(ranks) == live[ranks]
        assert len(cache) == len(live)


def test_the_least_recently_used_goes_first() -> None:
    cache = CommunicatorCache(limit_per_rank=2)
    cache.prepare([(0, 1)])
    cache.prepare([(0, 2)])
    cache.prepare([(0, 1)])
    changes = cache.prepare([(0, 3)])
    assert changes.evict == (((0, 2), 1),)
    assert changes.create == (((0, 3), 2),)
    assert [change.create for change in changes] == [False, True]


def test_only_what_makes_room_is_dropped() -> None:
    cache = CommunicatorCache(limit_per_rank=1)
    cache.prepare([(0, 1), (2, 3)])
    assert cache.prepare([(0, 2)]).evict == (((0, 1), 0), ((2, 3), 1))
    cache.prepare([(4, 5)])
    assert cache.prepare([(1, 3)]).evict == ()


def test_a_group_of_one_needs_no_communicator() -> None:
    assert CommunicatorCache(1).prepare([(0,), (1,)]) == ()


def test_a_plan_over_the_limit_is_refused_and_changes_nothing() -> None:
    cache = CommunicatorCache(limit_per_rank=1)
    cache.prepare([(0, 1)])
    with pytest.raises(PlanningError, match="2 communicators on rank 0 and the limit is 1"):
        cache.prepare([(0, 2), (0, 3)])
    assert cache.ranks == ((0, 1),)
