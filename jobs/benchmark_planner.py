"""Remakes every figure of docs/planner.md.

    python -m flexray.jobs.benchmark_planner --quick   the official solver's batches, minutes
    python -m flexray.jobs.benchmark_planner           everything, hours (FlexSP's two stages)

Every result is a line of OUT/results.jsonl, written as soon as it is there; what is there is not
computed again, so the benchmark goes on where it was stopped. One process, one thread. The tables
and plots hold what there is.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import track

from flexray.jobs import planner_report
from flexray.jobs.planner_cases import (
    BATCHES,
    BOUNDS,
    FLEXRAY,
    Case,
    Results,
    gap_cases,
    growth_cases,
    long_cases,
    method_cases,
    paper_cases,
    table_cases,
)
from flexray.solver.planner import warm


def cases(quick: bool) -> Iterator[Case]:
    """What is run, the quick ones first."""
    yield from table_cases(FLEXRAY)
    yield from method_cases(range(3, 7) if quick else BATCHES, slow=False)
    yield from growth_cases()
    quickly, well = BOUNDS
    if quick:
        yield from gap_cases(quickly, range(3, 6))
        return
    yield from paper_cases(range(3, 13), slow=False)
    yield from gap_cases(well, BATCHES)
    yield from table_cases(well)
    yield from long_cases()
    yield from paper_cases(range(3, 4), slow=True)
    yield from method_cases(BATCHES, slow=True)
    yield from paper_cases(range(3, 13), slow=True)


def main(
    out: Annotated[Path, typer.Option(help="Folder of results.")] = Path("runs/planner"),
    quick: Annotated[bool, typer.Option(help="Only what takes minutes.")] = False,
    report: Annotated[bool, typer.Option(help="Run nothing: tables of what is there.")] = False,
    document: Annotated[
        Path | None, typer.Option(help="docs/planner.md: its figures are replaced.")
    ] = None,
) -> None:
    """Remake the planner's figures."""
    out.mkdir(parents=True, exist_ok=True)
    results = Results(out / "results.jsonl")
    if not report:
        warm()
        todo = [case for case in dict.fromkeys(cases(quick)) if case not in results]
        for case in track(todo, description="planning"):
            results.run(case)
    text = planner_report.tables(results)
    (out / "summary.md").write_text(text)
    typer.echo(text)
    if document:
        planner_report.plots(results, document.parent)
        planner_report.fill(document, text)


if __name__ == "__main__":
    typer.run(main)
