"""What the driver costs: how long ranks wait for it between steps, and its own work a step.

    python -m flexray.jobs.benchmark_driver --quick     few steps: a minute
    python -m flexray.jobs.benchmark_driver             60 steps of each size
    python -m flexray.jobs.benchmark_driver --profile   where the loop's time goes at 16 ranks

Needs a machine that does nothing else. Exit code 0: all goals are reached; 1: one is missed; 2: it
cannot run here.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from flexray.datasets.errors import CorpusError
from flexray.errors import RunFailed, UserError
from flexray.jobs import driver_report
from flexray.jobs.driver_report import MANY, Figures
from flexray.jobs.driver_work import profiled, with_actors, with_reports
from flexray.jobs.planner_report import fill
from flexray.solver.plan import PlanningError

ACTORS = (4, 8, 16)


@dataclass(frozen=True)
class Size:
    """Steps with actors, steps with made-up reports, and of how many ranks."""

    steps: int
    reports: int
    ranks: tuple[int, ...]


FULL = Size(steps=60, reports=20, ranks=(64, 128, 256, 512, MANY))
QUICK = Size(steps=10, reports=5, ranks=(64, MANY))


def measure(folder: Path, size: Size) -> Figures:
    """All parts, one after another. Raises UserError, CorpusError, PlanningError, RunFailed."""
    load, real, stubbed = [], [], []

    def begin(part: str) -> None:
        load.append(os.getloadavg()[0])
        typer.echo(f"{part} (load {load[-1]:.1f})", err=True)

    for ranks in ACTORS:
        begin(f"{ranks} light actors")
        real.append(with_actors(folder, ranks, size.steps))
    for ranks in (*ACTORS, *size.ranks):
        begin(f"made-up reports of {ranks:,} ranks")
        stubbed.append(with_reports(folder, ranks, size.reports))
    return Figures(real, stubbed, load)


def main(
    out: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs/driver"),
    quick: Annotated[bool, typer.Option(help="Fewer steps: a minute.")] = False,
    document: Annotated[
        Path | None, typer.Option(help="docs/driver-figures.md: its figures are replaced.")
    ] = None,
    profile: Annotated[bool, typer.Option(help="Only profile the loop at 16 ranks.")] = False,
) -> None:
    """Measure what the driver costs."""
    size = QUICK if quick else FULL
    try:
        out.mkdir(parents=True, exist_ok=True)
        runs = Path(tempfile.mkdtemp(prefix="run-", dir=out.absolute()))
        if profile:
            typer.echo(profiled(runs, ACTORS[-1], size.steps))
            return
        figures = measure(runs, size)
        text = driver_report.report(figures)
        (out / "summary.md").write_text(text)
        typer.echo(text)
        if document:
            fill(document, text)
    except (UserError, CorpusError, PlanningError, RunFailed, OSError) as error:
        typer.echo(f"benchmark_driver: {error}", err=True)
        raise typer.Exit(2) from None
    missed = [goal for goal in driver_report.goals(figures) if not goal.is_reached]
    for goal in missed:
        typer.echo(f"missed: {goal}", err=True)
    raise typer.Exit(1 if missed else 0)


if __name__ == "__main__":
    typer.run(main)
