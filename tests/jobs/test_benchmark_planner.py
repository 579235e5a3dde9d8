"""The planner's benchmark: results are kept, tables hold only what was run."""

from __future__ import annotations

import pytest

from flexray.errors import UserError
from flexray.jobs import planner_report
from flexray.jobs.planner_cases import Case, Results

SMALL = {"sequences": 24}


def test_batches_are_cut_as_the_official_solver_cuts_them():
    rounded, true = Case("wikipedia", 3, padded=True), Case("wikipedia", 3)
    assert len(rounded.lengths()) == len(true.lengths()) == 512
    for up, length in zip(rounded.lengths(), true.lengths(), strict=True):
        assert up % 128 == 0 and 0 <= up - length < 128


def test_a_result_is_computed_once(tmp_path):
    case = Case("github", 0, "static", **SMALL)
    results = Results(tmp_path / "results.jsonl")
    results.run(case)
    again = Results(tmp_path / "results.jsonl")
    assert case in again and again[case] == results[case]
    again.run(case)
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 1


def test_flexrays_own_plan_is_bounded_and_shorter_than_static(tmp_path):
    results = Results(tmp_path / "results.jsonl")
    mine, static = Case("github", 0, **SMALL), Case("github", 0, "static", **SMALL)
    tight = Case("github", 0, "tight bound, quick", **SMALL)
    for case in (mine, static, tight):
        results.run(case)
    planned = results[mine]["planned_ms"]
    assert results[mine]["bound_ms"] <= results[tight]["bound_ms"] <= planned
    assert planned <= results[static]["planned_ms"]


def test_tables_hold_only_what_was_run(tmp_path):
    results = Results(tmp_path / "results.jsonl")
    assert planner_report.tables(results).count("Not run yet.") == 5
    results.run(Case("github", 3, "static"))
    results.run(Case("github", 3, "batch-adaptive"))
    rows = [r for r in planner_report.tables(results).splitlines() if "batch-adaptive |" in r]
    speedup = (
        results[Case("github", 3, "static")]["planned_ms"]
        / (results[Case("github", 3, "batch-adaptive")]["planned_ms"])
    )
    assert len(rows) == 1 and f"| {speedup:.2f} |" in rows[0]


def test_figures_go_between_the_markers(tmp_path):
    page = tmp_path / "planner.md"
    page.write_text(f"before\n{planner_report.BEGIN}\nold\n{planner_report.END}\nafter\n")
    planner_report.fill(page, "new")
    assert page.read_text() == (
        f"before\n{planner_report.BEGIN}\nnew\n{planner_report.END}\nafter\n"
    )
    page.write_text("no markers")
    with pytest.raises(UserError, match="no lines"):
        planner_report.fill(page, "new")
