"""What `flexray profile` shows: coefficients, fit errors, and what else was measured."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from rich.console import Console
from rich.table import Table

from flexray.measurement.fit import Fit
from flexray.measurement.measure import Measurements
from flexray.measurement.memory import Memory
from flexray.measurement.preset import MemoryTerms


def show_fit(measured: Measurements, fit: Fit, console: Console) -> None:
    """The coefficients with their standard errors, and how far predictions are off."""
    table = Table(title="Cost model", title_justify="left", box=None)
    table.add_column("coefficient")
    table.add_column("value", justify="right")
    table.add_column("unit")
    table.add_column("standard error", justify="right")
    for name, value, unit in _coefficients(measured, fit):
        error = fit.errors.get(name, 0.0)
        # Of what was fitted to nothing the relative error says nothing.
        table.add_row(name, f"{value:.4g}", unit, f"{error:.1%}" if error and value else "-")
    console.print(table)
    console.print()
    table = Table(title="Predicted against measured", title_justify="left", box=None)
    for name in ("", "predictions", "median error", "90% are under"):
        table.add_column(name, justify="right" if name else "left")
    for kind, points in fit.by_kind().items():
        errors = [point.error for point in points]
        middle, most = np.quantile(errors, [0.5, 0.9])
        table.add_row(kind, str(len(errors)), f"{middle:.1%}", f"{most:.1%}")
    console.print(table)
    slow = [f"rank {r} {s:.2f}" for r, s in enumerate(fit.speeds) if s != 1]
    if slow:
        console.print(f"\nspeeds that differ from the others' (1): {', '.join(slow)}")
    console.print()


def show_rest(
    measured: Measurements,
    across: dict[int, float],
    memory: Memory | None,
    terms: MemoryTerms,
    console: Console,
) -> None:
    """Communicators, the all-to-all across nodes (MB per ms by degree), memory."""
    made = [f"degree {d} {ms:.1f} ms" for d, ms in measured.creation_ms.items()]
    console.print(f"making a communicator: {', '.join(made) or 'none was needed'}")
    for degree, speed in across.items():
        console.print(
            f"all-to-all of degree {degree} across nodes: {speed:.4g} MB/ms "
            "(not in the preset: plans keep such groups inside a node)"
        )
    if memory is None:
        console.print(
            f"memory of a token: cannot be told from the processes' peaks here: the estimate stays "
            f"({terms.mb_per_token:.3g} MB)"
        )
    else:
        logits = (
            f"logits {memory.logits_mb:.1f} MB" if memory.logits_mb else "logits not told apart"
        )
        console.print(
            f"memory: {memory.mb_per_token:.3g} MB a token (estimated: "
            f"{measured.cost.mb_per_token:.3g}), {logits}, {memory.fixed_mb:,.0f} MB without tokens"
        )
    states = measured.cost.states_mb(measured.cluster.gpus)
    console.print(
        f"model states: {states:,.1f} MB a rank, counted; {terms.usable_mb:,.0f} MB usable"
    )


def _coefficients(measured: Measurements, fit: Fit) -> Iterator[tuple[str, float, str]]:
    cost = fit.cost
    yield "quadratic", cost.quadratic, "ms per token^2 (attention)"
    yield "linear", cost.linear, "ms per token"
    yield "per_sequence", cost.per_sequence, "ms per sequence"
    yield "micro_step_ms", cost.micro_step_ms, "ms per micro-step"
    yield "step_ms", fit.step_ms, "ms per step; not in the preset"
    if len(measured.degrees) > 1:
        yield "exchange_ms", cost.exchange_ms, "ms per group"
    for degree in measured.degrees[1:]:
        yield f"bandwidth {degree}", cost.bandwidth_at(degree), "MB per ms"
