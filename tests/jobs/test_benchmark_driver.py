"""The benchmark of the driver: its figures and its sentence, and small real runs of both kinds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flexray.jobs.driver_report import Figures, goals, needed, report
from flexray.jobs.driver_work import Real, Stubbed, calls_ms, real_of, with_actors, with_reports


def test_work_of_a_step_and_the_longest_idling():
    clocks = [(0.0, 0.0), (0.03, 0.01), (0.05, 0.02), (1.05, 0.03)]  # one step that was disturbed
    found = real_of(4, clocks, [1.0, 3.0, 2.0])
    assert (found.cpu, found.main) == (pytest.approx(30.0), pytest.approx(10.0))
    assert found.idle == (2.0, pytest.approx(2.9))


def figures(per_rank=0.5, many=500.0, idle=4.0):
    real = [Real(n, 60, (idle, 9.0), 10.0 + per_rank * n, 5.0) for n in (4, 8, 16)]
    stubbed = [Stubbed(n, 20, 5.0, 1.0, 3.0) for n in (4, 8, 16)]
    return Figures(real, [*stubbed, Stubbed(1024, 20, many - 2.0, 1.0, 1.0)], [0.1])


def test_calls_of_a_rank_are_the_growth_beyond_made_up_reports():
    found = figures()
    grown = [replace(one, rest=one.rest + one.ranks / 4) for one in found.stubbed]
    assert calls_ms(found.real, found.stubbed) == pytest.approx(0.5)
    assert calls_ms(found.real, grown) == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "Together that is 51% of a step of 2 s: hidden as it is."),
        ({"per_rank": 4.0}, "shared by 3 processes, each for 342 ranks"),  # 4,096 ms in 1,500
        ({"many": 3000.0}, "must be 1.5 times less"),
    ],
)
def test_what_is_needed_to_hide_it_follows_from_the_figures(changes, said):
    assert said in needed(figures(**changes))


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, []),
        ({"per_rank": 1.5}, ["the driver's work, 16 ranks"]),
        ({"idle": 5.5}, ["idle between steps, 4 ranks"]),
        ({"idle": 11.0}, ["idle between steps, 4 ranks", "idle between steps, 16 ranks"]),
    ],
)
def test_what_falls_short_is_told(changes, missed):
    found = figures(**changes)
    assert [goal.name for goal in goals(found) if not goal.is_reached] == missed
    assert report(found).count("**missed**") == len(missed)


def test_made_up_reports_go_through_the_real_loop(tmp_path):
    found = with_reports(tmp_path, 8, 2)
    assert min(found.fit, found.carried, found.rest) > 0
    lines = (tmp_path / "reports-8" / "events.jsonl").read_text().splitlines()
    assert (
        sum('"kind": "step"' in line for line in lines) == 32 + 2 - 1
    )  # the last is not committed
    assert any('"kind": "model"' in line for line in lines)  # they teach the cost model


@pytest.mark.timeout(300)  # actors start, on a busy machine slowly
def test_light_actors_are_driven_by_the_real_driver(tmp_path):
    found = with_actors(tmp_path, 2, 4)
    assert found.ranks == 2
    assert 0 < found.main <= found.cpu
    assert 0 <= found.idle[0] <= found.idle[1]
    assert '"world": 2' in (tmp_path / "actors-2" / "events.jsonl").read_text()
