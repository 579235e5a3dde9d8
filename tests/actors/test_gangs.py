"""Gangs on the fly: bounded, nothing leaks, the same on every rank; and calls that are refused."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from flexray.actors.engine import StaleGeneration, StepMismatch
from flexray.actors.gang import GangCache
from flexray.actors.timing import Stopwatch
from flexray.actors.work import RankMicroStep, RankStep
from flexray.solver.communicators import CommunicatorCache
from tests.actors.models import config, engine, label_tokens, sequences, work_of
from tests.worlds import run_world

WORLD, PLANS, LIMIT = 8, 1000, 6


def random_plans():
    """Groups of many plans: mostly aligned ones, now and then one of 30 odd rank sets.

    Dropping a gloo group takes 0.2 s, so not every plan may make a new one.
    """
    rng = random.Random(5)
    odd = [tuple(sorted(rng.sample(range(WORLD), rng.randint(2, 7)))) for _ in range(30)]
    for number in range(PLANS):
        if number % 6 == 0:
            yield [rng.choice(odd)]
            continue
        groups, start = [], 0
        while start < WORLD:
            degree = rng.choice([d for d in (1, 2, 4, 8) if start % d == 0])
            groups.append(tuple(range(start, start + degree)))
            start += degree
        yield groups


def open_things(gangs):
    """Descriptors, threads, and gangs that are open in this process."""
    return [*(len(list(Path(f"/proc/self/{d}").iterdir())) for d in ("fd", "task")), len(gangs)]


def run_plans(rank, world, store, plans):
    gangs = GangCache(rank, store, torch.device("cpu"), 30, Stopwatch())
    most, counts = 0, [open_things(gangs)]
    for number, (changes, groups) in enumerate(plans, 1):
        for change in changes:  # one by one: the bound holds at every moment
            gangs.apply([change])
            most = max(most, len(gangs))
        for ranks in groups:
            if rank in ranks and len(ranks) > 1:
                gang = gangs.get(ranks)
                out = gang.all_to_all(100.0 * rank + torch.arange(len(ranks)))
                assert out.tolist() == [100.0 * other + gang.rank for other in ranks], (ranks, out)
        if number in (PLANS // 5, PLANS):
            counts.append(open_things(gangs))
    gangs.clear()
    counts.append(open_things(gangs))
    return most, counts


def test_a_thousand_random_plans_leave_communicators_descriptors_and_threads_flat():
    """pytorch#40400, Megatron#6897: groups leak."""
    cache = CommunicatorCache(LIMIT)
    plans = [(cache.prepare(groups), groups) for groups in random_plans()]
    made = [change for changes, _ in plans for change in changes if change.create]
    lives = Counter(change.ranks for change in made)
    assert len(made) > 80
    assert max(lives.values()) > 3  # the same ranks again, under new serials
    assert len({change.serial for change in made}) == len(made)

    for most, counts in run_world(WORLD, run_plans, plans):
        assert most == LIMIT
        (descriptors, threads, _), *later, at_end = counts
        assert at_end == [descriptors, threads, 0]
        # Between, as many as the live gangs take, after 200 plans as after 1,000.
        for now_descriptors, now_threads, gangs in later:
            assert now_threads == threads + 3 * gangs, counts
            assert now_descriptors <= descriptors + 9 * gangs, counts


def refused(rank, world, store, hf_config):
    """What a rank does with work that is stale, or that reads other label tokens than planned."""
    batch = sequences((9, 6, 12))
    ours = engine(rank, world, store, batch, hf_config, generation=3)
    before = [p.to_local().clone() for p in ours.model.parameters()]
    communicators = CommunicatorCache(4)
    plan = [[((0, 1), (0, 1)), ((2,), (2,))]]
    total = label_tokens(batch)
    said = []
    work = [
        work_of(rank, plan, total, communicators, generation=2),
        work_of(rank, plan, total + 5, CommunicatorCache(4), generation=3),
    ]
    for part in work:
        try:
            ours.run_step(part)
        except (StaleGeneration, StepMismatch) as error:
            said.append((type(error).__name__, str(error)))
    unchanged = all(
        torch.equal(a, p.to_local()) for a, p in zip(before, ours.model.parameters(), strict=True)
    )
    clean = all(p.grad is None for p in ours.model.parameters()) and not ours.optimizer.state
    # The engine is as good as before.
    after = ours.run_step(work_of(rank, plan, total, communicators, step=2, generation=3))
    return said, unchanged and clean, after.loss


def test_stale_work_and_other_label_tokens_than_planned_are_refused_on_every_rank():
    results = run_world(3, refused, config())
    for said, as_before, loss in results:
        assert [kind for kind, _ in said] == ["StaleGeneration", "StepMismatch"]
        assert "generation 2 in generation 3" in said[0][1]
        assert "29 label tokens were planned and 24 were read" in said[1][1]
        assert as_before
        assert loss == results[0][2] > 0


def unknown_gang(rank, world, store):
    gangs = GangCache(rank, store, torch.device("cpu"), 30, Stopwatch())
    assert gangs.get((rank,)).degree == 1
    with pytest.raises(KeyError):
        gangs.get((0, 1))
    return len(gangs)


def test_a_gang_that_the_driver_never_had_made_is_an_error():
    assert run_world(2, unknown_gang) == [0, 0]


def uneven(rank, world, store, hf_config, rows_of_ranks, batch):
    """Every rank runs its own rows one by one; how many micro-steps there are is the plan's."""
    ours = engine(rank, world, store, batch, hf_config, dtype="float64")
    longest = max(len(rows) for rows in rows_of_ranks)
    own = rows_of_ranks[rank]
    parts = [RankMicroStep((rank,), own[i : i + 1]) for i in range(longest)]
    report = ours.run_step(RankStep(1, 0, label_tokens(batch), tuple(parts), ()))
    return report.loss, len(report.micro_steps), [m.sequences for m in report.micro_steps]


def test_ranks_with_unequal_numbers_of_samples_make_equal_numbers_of_collectives():
    batch = sequences((100, 100, 90, 90, 9, 5))
    batch[5] = (batch[5][0], np.full(5, -100))  # a sample without labels is not skipped
    results = run_world(3, uneven, config(), [(0,), (1, 2, 3), (4, 5)], batch)
    assert [(count, used) for _, count, used in results] == [
        (3, [1, 0, 0]),
        (3, [1, 1, 1]),
        (3, [1, 1, 0]),
    ]
    assert len({loss for loss, _, _ in results}) == 1
