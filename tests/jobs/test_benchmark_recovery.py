"""The benchmark of recovery: figures from events, what falls short, and a real run of each kind."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import typer

from flexray.jobs import benchmark_recovery, recovery_flexray, recovery_generations
from flexray.jobs.recovery_flexray import (
    Kill,
    Recoveries,
    kill_actors,
    lost_steps,
    recovery_of,
)
from flexray.jobs.recovery_generations import Growth, Look, count_generations, growth
from flexray.jobs.recovery_ray_train import Restart, restart_of
from flexray.jobs.recovery_report import Figures, goals, report
from flexray.jobs.recovery_snapshots import EVERY, SnapshotCost, cost_of

TINY = {
    "cluster": {"gpus": 4, "min_gpus": 3, "device": "cpu"},
    "data": {"max_length": 64},
    "train": {"batch_sequences": 4},
}


def step(number, generation, time, step_s, plan_wait_s=0.0):
    keys = {"kind": "step", "step": number, "generation": generation, "time": time}
    return keys | {"step_s": step_s, "plan_wait_s": plan_wait_s}


def generation(number, cause, time, pids, pause_s, at_step, steps_again):
    keys = {"kind": "generation", "generation": number, "cause": cause, "time": time, "pids": pids}
    took = {"form_s": 0.25, "build_s": 0.5, "restore_s": 0.125, "pause_s": pause_s}
    return keys | took | {"at_step": at_step, "steps_again": steps_again}


# A SIGKILL at 100 in step 5, which is made again and committed at the end of step 6.
EVENTS = [
    generation(1, "start", 90.0, [1, 2, 3, 4], 5.0, 1, 0),
    step(3, 1, 99.0, 1.0),
    step(4, 1, 100.25, 1.0),  # committed after the SIGKILL, from what is left
    generation(2, "death", 101.5, [1, 3, 4], 1.25, 5, 1),
    step(5, 2, 104.0, 1.0, plan_wait_s=0.25),
    step(6, 2, 105.0, 0.75),
    generation(3, "scale", 105.5, [1, 3, 4, 9], 0.5, 7, 0),
]
KILL = Kill(100.0, 2, (1, 2, 3, 4))


def test_a_recovery_is_split_into_its_parts():
    found = recovery_of(KILL, EVENTS)
    assert found.detection_s == 0.25  # the pause began at 100.25
    assert (found.forming_s, found.reshard_s, found.leaving_s) == (0.75, 0.125, 0.375)
    assert found.planning_s == 0.25
    # Step 5 is made again, and step 6 is new and commits it: 1.75 s of work in 4 s.
    assert (found.steps_again, found.commit_s) == (1, 0.75)
    assert found.total_s == 4.0 - 1.75
    assert (found.kept, found.join_s) == (True, 0.5)


def test_two_steps_made_again_leave_no_new_one_before_the_commit():
    events = [event | {"steps_again": 2} if "cause" in event else event for event in EVENTS]
    found = recovery_of(KILL, events)
    assert (found.steps_again, found.commit_s, found.total_s) == (2, 0.0, 2.25)


def test_a_step_that_the_join_commits_is_the_only_one_made():
    events = [event | {"generation": 3} if event.get("step") == 6 else event for event in EVENTS]
    found = recovery_of(KILL, events)
    assert (found.commit_s, found.total_s) == (0.0, 3.0)


def test_a_survivor_with_another_process_is_told():
    other = [event | {"pids": [1, 3, 8]} if "cause" in event else event for event in EVENTS]
    assert not recovery_of(KILL, other).kept


def test_lost_steps():
    assert lost_steps([3, 4, 5, 6], EVENTS) == 0
    assert lost_steps([3, 4, 4, 5, 6], EVENTS) == 1  # heard twice
    assert lost_steps([2, 3, 4, 5, 6], EVENTS) == 1  # not written down
    assert lost_steps([3, 4, 5, 6], [*EVENTS, step(6, 3, 106.0, 1.0)]) == 1  # written twice


def line(kind, time, pid, **values):
    return {"kind": kind, "time": time, "pid": pid} | values


def test_a_restart_of_ray_train():
    lines = [
        line("begun", 80.0, 1),
        line("begun", 80.5, 2),
        line("loaded", 85.0, 1),
        *(line("step", 85.0 + n, 1, step=n, step_s=n / 8) for n in range(1, 8)),
        line("step", 100.5, 1, step=8, step_s=1.0),  # its end was after the SIGKILL
        line("begun", 108.0, 3),
        line("begun", 109.0, 4),
        line("loaded", 111.0, 3),
        line("step", 112.5, 3, step=6, step_s=1.0),
    ]
    found = restart_of(100.0, lines)
    assert (found.restart_s, found.load_s, found.rest_s) == (8.0, 3.0, 0.5)
    assert found.total_s == 11.5
    assert (found.lost_steps, found.again_s) == (3, 6 / 8 + 7 / 8 + 1.0)
    assert found.kept == 0


def test_cost_of_snapshots():
    ends, slow = [0.0], [1.0, 3.0, 1.0]  # other work on the machine in the second period
    for factor in slow:
        for pays in (0.04, 0.02, 0.0, 0.0):
            ends.append(ends[-1] + factor * (1 + pays))
    assert len(ends) == 3 * EVERY + 1
    found = cost_of(ends)
    assert found.share == pytest.approx(0.06)
    assert (found.without_s, found.periods) == (pytest.approx(1.0), 3)


def test_growth_of_the_survivor_that_grew_most():
    looks = []
    for number in range(1, 201, 2):
        looks.append(Look(number, 7, 50, 12, 100.0 + number / 10))
        looks.append(Look(number, 8, 60 + (number > 100), 12, 100.0))
    looks += [Look(3, 9, 1, 1, 1.0), Look(5, 9, 500, 500, 500.0)]  # came and went
    looks.sort(key=lambda look: look.generation)
    found = {one.what: one for one in growth(looks)}
    assert found["threads"].share == 0.0
    assert found["descriptors"] == Growth("descriptors", 60, 61)
    assert found["resident_mb"].early == pytest.approx(102.5)
    assert found["resident_mb"].late == pytest.approx(119.5)


REACHED = Figures(
    flexray=Recoveries((replace(recovery_of(KILL, EVENTS), rest_s=0.0),) * 10, 0),
    ray_train=[Restart(12.0, 6.0, 0.5, 4, 8.0, 0)],
    snapshots=SnapshotCost(1.02, 1.0, 12),
    generations=200,
    growth=[Growth("threads", 20, 21)],
    load=[0.1],
)
ONE = REACHED.flexray.each[0]


def of_flexray(*each, lost_steps=0):
    return {"flexray": Recoveries(each, lost_steps)}


@pytest.mark.parametrize(
    ("missed", "changes"),
    [
        ([], {}),
        (["recovery, median"], of_flexray(*[replace(ONE, rest_s=1.0)] * 6, *[ONE] * 4)),
        (["recovery, worst"], of_flexray(*[ONE] * 9, replace(ONE, rest_s=5.0))),
        (["committed steps lost"], of_flexray(*[ONE] * 10, lost_steps=1)),
        (["steps made again, most"], of_flexray(*[ONE] * 9, replace(ONE, steps_again=3))),
        (["survivors with a new process"], of_flexray(*[ONE] * 9, replace(ONE, kept=False))),
        (["pause for a join, worst"], of_flexray(*[ONE] * 9, replace(ONE, join_s=2.1))),
        (["cost of snapshots"], {"snapshots": SnapshotCost(1.04, 1.0, 12)}),
        (
            ["growth of threads from generation 20 on"],
            {"growth": [Growth("threads", 20, 22)]},
        ),
    ],
)
def test_what_falls_short_is_told(missed, changes):
    figures = replace(REACHED, **changes)
    assert [goal.name for goal in goals(figures) if not goal.is_reached] == missed
    assert report(figures).count("**missed**") == len(missed)


def test_both_systems_stand_side_by_side():
    text = report(REACHED)
    assert "| SIGKILLs | 10 | 1 |" in text
    assert "| 1.75, 1.75 | 18.50, 18.50 |" in text
    assert "| 0 in all | 4, 4 |" in text


def test_without_ray_train_one_line_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray.train", None)
    with pytest.raises(typer.Exit) as exit_:
        benchmark_recovery.main(out=tmp_path)
    assert exit_.value.exit_code == 2
    assert "pip install 'ray[train]'" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.timeout(600)  # actors start, on a busy machine slowly
def test_a_killed_actor_is_replaced_and_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(recovery_flexray, "big_model", lambda: TINY)
    found = kill_actors(tmp_path, 1, seed=1)
    assert found.lost_steps == 0
    (one,) = found.each
    assert one.kept and one.steps_again <= 2
    assert min(one.detection_s, one.forming_s, one.reshard_s, one.join_s) > 0
    assert max(one.forming_s, one.reshard_s) < one.pause_s < one.total_s
    assert not list((tmp_path / "kills").glob("checkpoints"))


@pytest.mark.timeout(600)
def test_generations_come_and_go_and_survivors_are_looked_at(tmp_path, monkeypatch):
    monkeypatch.setattr(recovery_generations, "FIRST", 1)
    number, grown = count_generations(tmp_path, 4)
    assert number >= 4
    assert [one.what for one in grown] == ["descriptors", "threads", "resident_mb"]
    assert all(one.early > 0 for one in grown)
