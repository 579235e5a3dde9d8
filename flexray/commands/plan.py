"""`flexray plan`: one step's plan on paper. No GPU, no Ray, no torch."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from flexray.errors import UserError
from flexray.length_source import Lengths, read_lengths
from flexray.planning_input import (
    PRESET_HELP,
    DegreesOption,
    GpusOption,
    GpusPerNodeOption,
    MaxLengthOption,
    OverLength,
    OverLengthOption,
    SourceArgument,
    admitted,
    cluster_for,
    limit_for,
    parse_degrees,
    preset_for,
)
from flexray.presets import Preset
from flexray.solver.baselines import batch_adaptive, static
from flexray.solver.bound import tightened
from flexray.solver.cluster import Cluster
from flexray.solver.cost import CostModel
from flexray.solver.degrees import legal_degrees
from flexray.solver.plan import Dropped, Plan
from flexray.solver.planner import plan_step

# Stands in for a cost model when only a capacity is given.
DEFAULT_PRESET = "gpt-7b-a100-40g"


def plan(
    source: SourceArgument,
    gpus: GpusOption = None,
    gpus_per_node: GpusPerNodeOption = None,
    preset: Annotated[str | None, typer.Option(help=PRESET_HELP)] = None,
    capacity: Annotated[
        int | None,
        typer.Option(help="Tokens a GPU holds. Default: from the preset's memory figures."),
    ] = None,
    heads: Annotated[
        int | None, typer.Option(help="Query heads of the model.", show_default="32")
    ] = None,
    kv_heads: Annotated[
        int | None, typer.Option(help="Key/value heads.", show_default="32, or as many as heads")
    ] = None,
    degrees: DegreesOption = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Rows of a batch. Default: all rows are one batch.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Which batch, from 0.")] = 0,
    max_length: MaxLengthOption = None,
    over_length: OverLengthOption = OverLength.ERROR,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the plan: an .svg, .png or .pdf file."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The plan as JSON on stdout.")] = False,
    tight: Annotated[
        bool,
        typer.Option("--tight-bound", help="Show better how good the plan is: takes up to 20 s."),
    ] = False,
) -> None:
    """Plan one training step: which groups of GPUs form and which rows each gets.

    Shows every micro-step, how far the plan is from the best possible, and
    how much faster it is than one group size for all. Over-long rows are
    removed first, then the file is cut into batches. Rows are numbered from
    0: over-long rows by their position in the input, all others by their
    position in the batch.

    Examples:

      flexray plan 48000,900,900,350 --gpus 8 --capacity 8000

      flexray plan lengths.parquet --preset gpt-7b-a100-40g --batch-size 512

      flexray plan my-corpus --gpus 6 --capacity 4096 --heads 8 --kv-heads 2

    What cannot be planned is one line on stderr and exit code 2.
    """
    if preset is None and capacity is None:
        raise UserError("give --preset NAME, or --capacity TOKENS for a default cost model")
    if preset is None and gpus is None:
        raise UserError("give --gpus N, or --preset NAME for its cluster")
    if plot is not None and plot.suffix not in {".svg", ".png", ".pdf"}:
        raise UserError(f"--plot {plot}: give a file that ends in .svg, .png or .pdf")
    model = preset_for(preset or DEFAULT_PRESET, max_length)
    cluster = cluster_for(model, gpus, gpus_per_node)
    cost = model.cost if capacity is None else model.cost.with_capacity(capacity)
    allowed = _degrees(degrees, heads, kv_heads, model if preset else None)

    lengths = read_lengths(source)
    limit = limit_for(max_length, cost, cluster, allowed, ("raise --capacity",))
    rows = admitted(lengths, limit, over_length)
    batch_rows, over_long = _cut(rows, len(lengths), batch_size, batch)
    result = plan_step(lengths[batch_rows].tolist(), cost, cluster, allowed)
    if tight:
        result = tightened(result, lengths[batch_rows].tolist(), cost, cluster, allowed)
    result = replace(
        result,
        dropped=(
            *(
                Dropped(
                    int(row),
                    int(lengths[row]),
                    f"row {row} of the input is over {limit.tokens} tokens",
                )
                for row in over_long
            ),
            *(
                replace(dropped, why=f"row {dropped.row} of the batch has no token")
                for dropped in result.dropped
            ),
        ),
    )
    if plot is not None:
        _draw(result, cluster, plot)
    if as_json:
        typer.echo(json.dumps(result.to_dict()))
        return
    if result.micro_steps:
        longest = int(lengths[rows].max())
        _show(result, lengths[batch_rows].tolist(), longest, cost, cluster, allowed)
    else:
        typer.echo("nothing is left to plan")
    for left_out in result.dropped[:10]:
        typer.echo(f"left out: {left_out.why} (length {left_out.length})")
    if len(result.dropped) > 10:
        typer.echo(f"left out: {len(result.dropped) - 10} more rows (--json lists all)")


def _degrees(
    given: str | None,
    heads: int | None,
    kv_heads: int | None,
    preset: Preset | None,
) -> tuple[int, ...]:
    """What the user named, else what the named heads allow, else the preset's, else 32 heads'."""
    if given is not None:
        return parse_degrees(given)
    if preset is not None and heads is None and kv_heads is None:
        return preset.degrees
    queries = heads if heads is not None else preset.heads if preset else 32
    return legal_degrees(queries, kv_heads if kv_heads is not None else queries, queries)


def _cut(rows: Lengths, total: int, size: int | None, batch: int) -> tuple[Lengths, Lengths]:
    """Rows of one batch, and the rows left out of the stretch of the input that it covers."""
    if size is None:
        size = max(1, len(rows))
    if size < 1 or batch < 0:
        raise UserError(f"--batch-size {size} --batch {batch}: give at least 1 row and batch 0")
    first, last = batch * size, min((batch + 1) * size, len(rows))
    if batch and first >= len(rows):
        raise UserError(
            f"--batch {batch}: {len(rows)} rows make {-(-len(rows) // size)} batches of {size}, "
            "counted from 0"
        )
    start = rows[first - 1] + 1 if first else 0
    stop = rows[last] if last < len(rows) else total
    return rows[first:last], np.setdiff1d(np.arange(start, stop), rows[first:last])


def _draw(plan: Plan, cluster: Cluster, path: Path) -> None:
    # Here, not above: matplotlib takes longer to load than a plan takes to make.
    from flexray.gantt import draw_step

    try:
        draw_step(plan, cluster, path)
    except OSError as error:
        raise UserError(f"--plot {path}: cannot be written: {error.strerror}") from None


def _show(
    plan: Plan,
    lengths: list[int],
    longest: int,
    cost: CostModel,
    cluster: Cluster,
    degrees: tuple[int, ...],
) -> None:
    table = Table(title=f"{len(lengths)} rows on {cluster.gpus} GPUs", title_justify="left")
    for name in ("micro-step", "groups", "rows", "tokens", "longest", "busy GPUs", "time"):
        table.add_column(name, justify="left" if name == "groups" else "right")
    for m, (step, groups) in enumerate(
        zip(plan.micro_steps, plan.summary.split(" | "), strict=True)
    ):
        rows = [length for g in step.groups for length in g.lengths]
        busy = sum(g.degree * g.planned_ms for g in step.groups)
        slowest = max(g.planned_ms for g in step.groups)
        table.add_row(
            str(m),
            groups,
            f"{len(rows):,}",
            f"{sum(rows):,}",
            f"{max(rows):,}",
            f"{busy / (slowest * cluster.gpus):.0%}" if slowest else "-",
            f"{step.planned_ms:,.1f} ms",
        )
    console = Console()
    console.print(table)
    console.print(
        f"step {plan.planned_ms:,.1f} ms; no plan is under {plan.lower_bound_ms:,.1f} ms "
        f"(gap {plan.gap:.1%}); planned in {plan.solve_s:.2f} s ({plan.method})"
    )
    if plan.planned_ms:
        for name, other in (
            ("static, one degree for all data", static(lengths, cost, cluster, degrees, longest)),
            ("best single degree for this batch", batch_adaptive(lengths, cost, cluster, degrees)),
        ):
            console.print(
                f"{other.planned_ms / plan.planned_ms:.2f}x as fast as {name} "
                f"({other.planned_ms:,.1f} ms: {other.summary})"
            )
