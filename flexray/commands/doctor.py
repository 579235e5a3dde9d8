"""`flexray doctor`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from flexray.doctor import Report


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what this machine has and what a run on it would use.

    Looks for torch, CUDA, NCCL, GPUs, flash-attn, Ray and Weights & Biases; says in which order
    the attention backends are tried and which one is taken. Connects to nothing, starts nothing,
    and works with any of them missing or broken.
    """
    from flexray.doctor import examine

    report = examine()
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=2))
    else:
        _show(report)


def _show(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    marks = {"ok": ("✓", "green"), "missing": ("–", "yellow"), "broken": ("✗", "red")}

    def section(title: str, rows: list[tuple[str, str, str]]) -> Table:
        table = Table(title=title, title_justify="left", title_style="bold", box=None)
        table.show_header = False
        table.add_column(width=1)
        table.add_column(min_width=17, no_wrap=True)
        table.add_column(overflow="fold")
        for status, name, detail in rows:
            mark, style = marks[status]
            table.add_row(Text(mark, style), Text(name), Text(detail))
        return table

    console = Console(highlight=False)
    console.print(section("This machine", [(f.status, f.name, f.detail) for f in report.findings]))
    console.print()
    order = [("ok" if a.usable else "missing", a.name, a.why) for a in report.attention]
    console.print(section("Attention backends, in the order tried", order))
    console.print()
    console.print(section("A run here would use", [("ok", k, v) for k, v in report.used.items()]))
