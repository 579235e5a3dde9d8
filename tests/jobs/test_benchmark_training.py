"""The benchmark of training: its turns, corpora and figures, and a small run of emulated ranks."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import psutil
import pytest
import typer

from flexray.datasets.corpus import Corpus
from flexray.jobs import benchmark_training, training_emulation, training_parts
from flexray.jobs.training_corpora import Rows, write_corpus
from flexray.jobs.training_emulation import Emulation
from flexray.jobs.training_parts import (
    LEARNING,
    SLOW_RANK,
    WAYS,
    Compared,
    Converged,
    Size,
    SlowRank,
    compare,
    compared,
    in_turns,
    slow_turns,
    slowness,
)
from flexray.jobs.training_report import Figures, goals, report
from flexray.jobs.training_turns import (
    ADAPTIVE,
    FLEXRAY,
    STATIC,
    UNAWARE,
    Run,
    Step,
    planned,
)
from flexray.planning_tasks import PlanRequest
from flexray.solver.cluster import Cluster
from flexray.solver.cost import CostModel

COST = CostModel(1e-5, 0.05, 2.0, 40.0)


def test_every_batch_has_each_way_once_and_who_begins_changes():
    turns = in_turns(Size(1, 2), WAYS)
    for batch in range(3):
        mine = [turn for turn in turns if turn.batch == batch]
        assert sorted(turn.way for turn in mine) == sorted(WAYS)
    assert [turn.way for turn in turns[::3]] == list(WAYS)


def test_lengths_are_scaled_and_too_long_ones_left_out(tmp_path):
    lengths = np.array([1, 47, 48, 24 * 100, 24 * 100 + 1])
    assert Rows(24, 100).of(lengths).tolist() == [2, 2, 2, 100]
    corpus = Corpus.open(write_corpus("github", tmp_path / "corpus", Rows(24, 512)))
    assert 512 * 0.9 < corpus.lengths.max() <= 512 and corpus.lengths.min() == 2
    assert 24 * 512 < 23_000  # the 99th percentile: some were left out
    assert len(corpus.lengths) < 18_415


def test_static_takes_the_degree_of_the_longest_of_the_corpus():
    cost = CostModel(0.0, 0.05, per_sequence=5.0).with_capacity(100)
    request = PlanRequest(cost, Cluster((4,)), (1, 2, 4), ())
    lengths = (50,) * 8
    degrees = {way: planned(lengths, request, 350, way).degrees for way in WAYS}
    assert {d for micro_step in degrees[STATIC] for d in micro_step} == {4}
    assert {d for micro_step in degrees[FLEXRAY] for d in micro_step} == {1}


def test_a_plan_that_does_not_know_of_a_slow_rank_is_told_what_it_takes():
    cost = CostModel(0.0, 1.0).with_capacity(100)
    request = PlanRequest(cost, Cluster((2,), speeds=(1.0, 0.5)), (1, 2), ())
    aware, unaware = (planned((40,) * 3, request, 40, way) for way in (FLEXRAY, UNAWARE))
    assert aware.planned_ms == pytest.approx(80.0)  # two on the fast one
    assert unaware.planned_ms > aware.planned_ms


def steps(taken, turns, speeds=(1.0,)):
    return [Step(turn, taken(turn), 0.9 * taken(turn), speeds) for turn in turns]


def test_steps_that_warm_up_do_not_count():
    size = Size(2, 2)
    wall = {FLEXRAY: 1.0, STATIC: 1.5, ADAPTIVE: 1.25}
    made = steps(lambda t: wall[t.way] if t.batch >= 2 else 99.0, in_turns(size, WAYS))
    found = compared("github", 4, True, Run(tuple(made), COST), size)
    assert (found.speedup(STATIC), found.speedup(ADAPTIVE)) == (1.5, 1.25)
    assert found.planned_speedup(STATIC) == pytest.approx(1.5)
    assert found.off == pytest.approx(0.1)


def test_a_slow_rank_is_found_and_the_same_batches_are_compared():
    size, healthy = Size(1, 2), (1.0,) * 4
    turns = slow_turns(size)
    begin, end = 3, 3 + LEARNING
    assert [turn.way for turn in turns[end:]] == [FLEXRAY, UNAWARE] * 2
    assert {t.batch for t in turns[end:]} == {t.batch for t in turns[1:begin]}
    known = tuple(0.5 if rank == SLOW_RANK else 1.0 for rank in range(4))
    made = steps(lambda t: 1.0, turns[:begin], healthy)
    made += steps(lambda t: 2.0, turns[begin : begin + 7], healthy)
    made += steps(lambda t: 1.2 if t.way == FLEXRAY else 2.0, turns[begin + 7 :], known)
    found = slowness(made, size)
    assert (found.healthy_s, found.aware_s, found.unaware_s) == (1.0, pytest.approx(1.2), 2.0)
    assert found.found == 7
    assert found.over_best == pytest.approx(1.2 * 3.5 / 4 - 1)
    never = [replace(step, speeds=healthy) for step in made]
    assert slowness(never, size).found is None


def test_emulated_compute_is_the_stated_cost():
    emulation = Emulation(COST, slow_rank=2, slow_from=5)
    expected = (COST.quadratic * 5e4 + COST.linear * 300) / 2 + 2 * COST.per_sequence
    assert emulation.compute_ms([100, 200], 2, rank=1, step=5) == pytest.approx(expected)
    assert emulation.compute_ms([100, 200], 2, rank=2, step=4) == pytest.approx(expected)
    assert emulation.compute_ms([100, 200], 2, rank=2, step=5) == pytest.approx(2 * expected)
    assert emulation.compute_ms([], 1, rank=0, step=1) == 0


def test_pinning_moves_every_thread_of_a_process():
    before = os.sched_getaffinity(0)
    try:
        training_emulation.pin(1)
        cores = {frozenset(os.sched_getaffinity(t.id)) for t in psutil.Process().threads()}
        assert len(cores) == 1 and len(cores.pop()) == 1
    finally:
        for thread in psutil.Process().threads():
            os.sched_setaffinity(thread.id, before)


def one(ranks, static=1.5, adaptive=1.2, off=0.03):
    taken = {FLEXRAY: 1.0, STATIC: static, ADAPTIVE: adaptive}
    return Compared("github", ranks, ranks != 2, 16, taken, taken, off, COST)


RIGHT = Converged(before=0.8, after=0.07, steps=16)
SLOW = SlowRank(healthy_s=1.0, aware_s=1.2, unaware_s=1.9, found=9, batches=16)


@pytest.mark.parametrize(
    ("figures", "missed"),
    [
        (Figures([one(2, 1.15, 1.0, 0.3), one(4)], RIGHT, SLOW, COST, [0.1]), []),
        (
            Figures([one(2, 1.05)], RIGHT, SLOW, COST, [0.1]),
            ["github, 2 ranks: over the static degree"],
        ),
        (
            Figures([one(4, 1.35)], RIGHT, SLOW, COST, [0.1]),
            ["github, 4 ranks: over the static degree"],
        ),
        (
            Figures([one(8, adaptive=1.05, off=0.06)], RIGHT, SLOW, COST, [0.1]),
            [
                "github, 8 ranks: over the best single degree",
                "github, 8 ranks: off what was planned",
            ],
        ),
        (
            Figures([one(4)], RIGHT, replace(SLOW, found=None, aware_s=1.4), COST, [0.1]),
            ["slow rank: steps until it is planned with", "slow rank: over the best possible"],
        ),
        (
            Figures([one(4)], replace(RIGHT, after=0.11), SLOW, COST, [0.1]),
            ["three times wrong: off after 20 steps"],
        ),
        (
            Figures([one(4)], RIGHT, replace(SLOW, found=11), COST, [0.1]),
            ["slow rank: steps until it is planned with"],
        ),
    ],
)
def test_what_falls_short_is_told(figures, missed):
    assert [goal.name for goal in goals(figures) if not goal.is_reached] == missed
    text = report(figures)
    assert text.count("**missed**") == len(missed)
    assert "emulated compute" in text


def test_a_machine_of_one_core_cannot_run_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    with pytest.raises(typer.Exit) as exit_:
        benchmark_training.main(out=tmp_path)
    assert exit_.value.exit_code == 2
    assert "2 ranks need a core each" in capsys.readouterr().err


@pytest.mark.timeout(300)  # actors start, on a busy machine slowly
def test_ways_take_turns_on_emulated_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(training_parts, "ROWS", Rows(24, 256))
    monkeypatch.setitem(training_parts.BATCH_TOKENS, 2, 512)
    slept = replace(COST, quadratic=1e-3)  # as rows of up to 256 tokens can tell
    found = compare(tmp_path, "github", 2, Size(1, 1), slept)
    assert found.is_emulated and found.batches == 1
    slept_s = slept.micro_step_ms / 1e3
    assert all(taken > slept_s for taken in found.taken_s.values())
    assert found.cost.quadratic == pytest.approx(slept.quadratic, rel=0.5)
    assert found.cost.linear == pytest.approx(slept.linear, rel=0.5)
    assert not (tmp_path / "github-2" / "checkpoints").exists()
