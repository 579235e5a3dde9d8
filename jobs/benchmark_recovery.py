"""What a SIGKILL costs, here and with Ray Train v2, in one run on the same CPUs and model.

    python -m flexray.jobs.benchmark_recovery --quick   3 SIGKILLs, 40 generations: minutes
    python -m flexray.jobs.benchmark_recovery           10 SIGKILLs, 200 generations

Needs Ray Train (`pip install 'ray[train]'`) and a machine that does nothing else. Exit code 0: all
goals are reached; 1: one is missed; 2: it cannot run here.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from flexray.errors import RunFailed, UserError
from flexray.jobs import recovery_report
from flexray.jobs.planner_report import fill
from flexray.jobs.recovery_flexray import kill_actors
from flexray.jobs.recovery_generations import count_generations
from flexray.jobs.recovery_ray_train import kill_workers
from flexray.jobs.recovery_report import Figures
from flexray.jobs.recovery_snapshots import snapshot_cost

SEED = 1


@dataclass(frozen=True)
class Size:
    """How much of each part is done."""

    kills: int
    restarts: int
    periods: int
    generations: int


FULL = Size(kills=10, restarts=3, periods=36, generations=200)
QUICK = Size(kills=3, restarts=1, periods=4, generations=40)


def measure(folder: Path, size: Size) -> Figures:
    """All parts, one after another. Raises UserError without Ray Train, RunFailed."""
    load = []

    def begin(part: str) -> None:
        load.append(os.getloadavg()[0])
        typer.echo(f"{part} (load {load[-1]:.1f})", err=True)

    begin(f"Ray Train v2: {size.restarts} SIGKILLs")
    ray_train = kill_workers(folder / "ray-train", size.restarts, SEED)
    begin(f"FlexRay: {size.kills} SIGKILLs")
    flexray = kill_actors(folder, size.kills, SEED)
    begin(f"FlexRay: {size.periods} times two steps with a copy, two without")
    snapshots = snapshot_cost(folder, size.periods)
    begin(f"FlexRay: {size.generations} generations")
    generations, growth = count_generations(folder, size.generations)
    return Figures(flexray, ray_train, snapshots, generations, growth, load)


def main(
    out: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs/recovery"),
    quick: Annotated[bool, typer.Option(help="Less of everything: minutes.")] = False,
    document: Annotated[
        Path | None, typer.Option(help="docs/recovery.md: its figures are replaced.")
    ] = None,
) -> None:
    """Measure recovery from SIGKILL, and what being ready for it costs."""
    out.mkdir(parents=True, exist_ok=True)
    runs = Path(tempfile.mkdtemp(prefix="run-", dir=out.absolute()))
    try:
        figures = measure(runs, QUICK if quick else FULL)
        text = recovery_report.report(figures)
        (out / "summary.md").write_text(text)
        typer.echo(text)
        if document:
            fill(document, text)
    except (UserError, RunFailed) as error:
        typer.echo(f"benchmark_recovery: {error}", err=True)
        raise typer.Exit(2) from None
    missed = [goal for goal in recovery_report.goals(figures) if not goal.is_reached]
    for goal in missed:
        typer.echo(f"missed: {goal}", err=True)
    raise typer.Exit(1 if missed else 0)


if __name__ == "__main__":
    typer.run(main)
