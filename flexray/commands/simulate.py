"""`flexray simulate`: what the data would gain on a cluster. No GPU, no Ray, no torch."""

from __future__ import annotations

import json
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from flexray.errors import UserError
from flexray.length_source import read_lengths
from flexray.planning_input import (
    PRESET_HELP,
    DegreesOption,
    GpusOption,
    GpusPerNodeOption,
    MaxLengthOption,
    OverLength,
    OverLengthOption,
    SourceArgument,
    cluster_for,
    limit_for,
    parse_degrees,
    preset_for,
)
from flexray.simulation.batches import Batches
from flexray.simulation.folder import SimulationFolder
from flexray.simulation.run import run
from flexray.simulation.strategies import BASELINE, SLOW, STRATEGIES, StepResult
from flexray.simulation.study import Study
from flexray.simulation.summary import StrategySummary, median_and_slowest, summarise

QUICK = ",".join(name for name in STRATEGIES if name != SLOW)


def simulate(
    source: SourceArgument,
    preset: Annotated[str, typer.Option(help=PRESET_HELP, show_default=False)],
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder of the results.", show_default=False)
    ],
    gpus: GpusOption = None,
    gpus_per_node: GpusPerNodeOption = None,
    batch_size: Annotated[int, typer.Option(help="Rows of a batch.")] = 512,
    steps: Annotated[int, typer.Option(help="Batches to simulate.")] = 40,
    first_batch: Annotated[int, typer.Option(help="The first of them, from 0.")] = 0,
    max_length: MaxLengthOption = None,
    over_length: OverLengthOption = OverLength.ERROR,
    degrees: DegreesOption = None,
    strategies: Annotated[
        str,
        typer.Option(
            help=f"all, or some of {','.join(STRATEGIES)}; {BASELINE} is always among them. "
            f"{SLOW} takes up to minutes a batch."
        ),
    ] = QUICK,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace another simulation in DIR.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The summary as JSON on stdout.")] = False,
) -> None:
    """Simulate what planning every step would gain on a cluster, before renting it.

    Plans the batches of a data set under several strategies with the cost
    model of a preset, and compares step times: `static` is one group size
    for the whole run, the smallest that holds the longest row; `flexray` a
    new plan for every step. Needs no GPU. Over-long rows are removed first,
    then the file is cut into batches; only full batches are simulated.

    Examples:

      flexray simulate lengths.parquet --preset gpt-7b-a100-40g --out sim

      flexray simulate my-corpus --preset my-cluster.yaml --gpus 32 --steps 10 --out sim32

    DIR gets summary.json, steps.jsonl (a line per strategy and batch) and
    pictures. Interrupted, the same command goes on where it stopped.
    docs/simulate.md says how to read the results.
    """
    names = _strategies(strategies)
    model = preset_for(preset, max_length)
    cluster = cluster_for(model, gpus, gpus_per_node)
    allowed = model.degrees if degrees is None else parse_degrees(degrees)
    limit = limit_for(max_length, model.cost, cluster, allowed)
    lengths = read_lengths(source)
    batches = Batches.cut(lengths, limit, over_length, batch_size, first_batch, steps)
    study = Study(batches, model.cost, cluster, allowed, names)
    stderr = Console(stderr=True, highlight=False, soft_wrap=True)
    if len(batches.lengths) < steps:
        stderr.print(
            f"the rows make {len(batches.lengths)} full batches of {batch_size} from batch "
            f"{first_batch} on: simulating these instead of {steps}"
        )
    folder = SimulationFolder.open(out, study.settings, overwrite)
    results = _run(study, folder, stderr)

    what = f"simulated with {preset}{' (an estimate)' if model.estimate else ''}"
    summaries, by_size = summarise(study.steps(results)), study.by_size(results)
    shown = [r for r in study.steps(results) if r.strategy == _shown(names)]
    # Here, not above: matplotlib takes longer to load than a page of help may.
    from flexray.simulation.plots import draw_all

    draw_all(study, summaries, by_size, shown, what, folder)
    summary = {
        "finished": True,
        "settings": study.settings,
        "preset": {"name": preset, "source": model.source, "estimate": model.estimate},
        **_figures(study, summaries, by_size, shown),
    }
    folder.write_summary(summary)
    if as_json:
        typer.echo(json.dumps(summary))
    else:
        _show(study, summaries, what, folder)


def _strategies(text: str) -> tuple[str, ...]:
    if text == "all":
        return tuple(STRATEGIES)
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in STRATEGIES:
            near = get_close_matches(name, STRATEGIES, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(STRATEGIES)}"
            raise UserError(f"--strategies: no strategy {name}: {hint}")
    return tuple(name for name in STRATEGIES if name in names or name == BASELINE)


def _shown(strategies: tuple[str, ...]) -> str:
    """The one whose steps are drawn: they are planned once more, so never the slow one."""
    return "flexray" if "flexray" in strategies else [s for s in strategies if s != SLOW][-1]


def _run(study: Study, folder: SimulationFolder, stderr: Console) -> list[StepResult]:
    bar = Progress(
        TextColumn("simulating"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=stderr,
        transient=True,
        disable=not stderr.is_terminal,
    )
    task = bar.add_task("", total=len(study.tasks))
    done = 0

    def progress(count: int) -> None:
        nonlocal done
        done = count
        bar.update(task, completed=count)

    try:
        with bar:
            return run(study.tasks, folder.steps_path, progress)
    except KeyboardInterrupt:
        stderr.print(
            f"stopped: {done} of {len(study.tasks)} plans are done and kept in {folder.path}; the "
            "same command goes on"
        )
        raise


def _figures(
    study: Study,
    summaries: list[StrategySummary],
    by_size: dict[int, list[StrategySummary]],
    shown: list[StepResult],
) -> dict[str, Any]:
    median, slowest = median_and_slowest(shown)
    return {
        "rows": study.batches.rows,
        "tokens": study.batches.tokens,
        "longest": study.batches.longest,
        "left_out": {
            "over_length": study.batches.over_long,
            "zero_length": study.batches.zero_length,
        },
        "strategies": [asdict(s) for s in summaries],
        "cluster_sizes": [
            {
                "gpus": gpus,
                "steps": study.steps_of_a_size,
                "speedup": {s.strategy: s.speedup for s in of_size},
            }
            for gpus, of_size in by_size.items()
        ],
        "drawn_steps": {
            "strategy": median.strategy,
            "median": {"batch": median.batch, "planned_ms": median.planned_ms},
            "slowest": {"batch": slowest.batch, "planned_ms": slowest.planned_ms},
        },
    }


def _show(
    study: Study, summaries: list[StrategySummary], what: str, folder: SimulationFolder
) -> None:
    batches = study.batches
    table = Table(
        title=f"{what}: {study.cluster.gpus} GPUs, {len(batches.lengths)} batches of "
        f"{batches.size} rows",
        title_justify="left",
        box=None,
        padding=(0, 2, 0, 0),
        header_style="dim",
    )
    table.add_column("strategy", no_wrap=True)
    for name in ("step", "speed-up", "idle", "all-to-all", "gap", "plan", "95%"):
        table.add_column(name, justify="right", no_wrap=True)
    for s in summaries:
        table.add_row(
            s.strategy,
            f"{s.mean_step_ms / 1e3:.2f} s",
            f"{s.speedup:.2f}x",
            f"{s.idle:.1%}",
            f"{s.exchange:.1%}",
            f"{s.gap:.1%}",
            f"{s.planning_mean_s:.2f} s",
            f"{s.planning_p95_s:.2f} s",
            style="bold" if s.strategy == "flexray" else "",
        )
    console = Console(highlight=False)
    console.print(table)
    console.print(
        f"{batches.rows:,} rows, {batches.tokens:,} tokens, the longest row {batches.longest:,}; "
        f"left out: {batches.over_long:,} rows over {batches.limit:,} tokens, "
        f"{batches.zero_length:,} of length 0",
        soft_wrap=True,
    )
    files = ", ".join(file.name for file in folder.files if file.exists())
    console.print(f"in {folder.path}: {files}", soft_wrap=True)
