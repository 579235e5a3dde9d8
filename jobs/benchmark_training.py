"""Steps under FlexRay's plans against one degree for all, on the same batches in one run.

    python -m flexray.jobs.benchmark_training --quick   3 batches each: minutes
    python -m flexray.jobs.benchmark_training           12 batches each

Needs a machine that does nothing else. Exit code 0: all goals are reached; 1: one is missed; 2: it
cannot run here.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from flexray.datasets.errors import CorpusError
from flexray.errors import RunFailed, UserError
from flexray.jobs import training_report
from flexray.jobs.planner_report import fill
from flexray.jobs.training_corpora import CORPORA
from flexray.jobs.training_parts import (
    EMULATED,
    PINNED,
    Size,
    compare,
    converge,
    measured_cost,
    slow_rank,
)
from flexray.jobs.training_report import Figures
from flexray.solver.plan import PlanningError

FULL = Size(warm=6, measured=12)
QUICK = Size(warm=4, measured=3)


def measure(folder: Path, size: Size) -> Figures:
    """All parts, one after another. Raises UserError, CorpusError, PlanningError, RunFailed."""
    load, compared = [], []

    def begin(part: str) -> None:
        load.append(os.getloadavg()[0])
        typer.echo(f"{part} (load {load[-1]:.1f})", err=True)

    for corpus in CORPORA:
        begin(f"{corpus}, {PINNED} ranks")
        compared.append(compare(folder, corpus, PINNED, size))
    begin("three times wrong")
    converged = converge(folder, compared[-1].cost, size)
    begin("what is to be slept")
    slept = measured_cost(folder, size)
    for ranks in EMULATED:
        for corpus in CORPORA:
            begin(f"{corpus}, {ranks} ranks, emulated compute")
            compared.append(compare(folder, corpus, ranks, size, slept))
    begin("a slow rank, emulated compute")
    return Figures(compared, converged, slow_rank(folder, size, slept), slept, load)


def main(
    out: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs/training"),
    quick: Annotated[bool, typer.Option(help="Fewer batches: minutes.")] = False,
    document: Annotated[
        Path | None, typer.Option(help="docs/training-figures.md: its figures are replaced.")
    ] = None,
) -> None:
    """Measure what plans of many degrees are worth, end to end."""
    try:
        if (cores := len(os.sched_getaffinity(0))) < PINNED:
            raise UserError(f"{PINNED} ranks need a core each, and this process may use {cores}")
        out.mkdir(parents=True, exist_ok=True)
        runs = Path(tempfile.mkdtemp(prefix="run-", dir=out.absolute()))
        figures = measure(runs, QUICK if quick else FULL)
        text = training_report.report(figures)
        (out / "summary.md").write_text(text)
        typer.echo(text)
        if document:
            fill(document, text)
    except (UserError, CorpusError, PlanningError, RunFailed, OSError) as error:
        typer.echo(f"benchmark_training: {error}", err=True)
        raise typer.Exit(2) from None
    missed = [goal for goal in training_report.goals(figures) if not goal.is_reached]
    for goal in missed:
        typer.echo(f"missed: {goal}", err=True)
    raise typer.Exit(1 if missed else 0)


if __name__ == "__main__":
    typer.run(main)
