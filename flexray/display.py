"""What `flexray train` shows: live progress on a terminal, a line a step anywhere else.

Usage:
    with Display() as display:
        display.message("4 ranks on cpu")
        display.step(view)
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from flexray.events import StepEvent

if TYPE_CHECKING:
    from flexray.prefetch import PlannedBatch

# Steps that stay in sight on a terminal.
_ROWS = 10


@dataclass(frozen=True)
class StepView:
    """What is shown of one step.

    Attributes:
        loss: 0 where the step had no label.
        skipped: its gradient was not finite, so that it changed nothing.
        plan: degrees of each micro-step, such as `4 | 2 1 1`.
        speedup: planned, over the best single static degree.
        plan_wait_ms: how long the driver waited for the plan.
    """

    step: int
    steps: int
    loss: float
    tokens_per_s: float
    plan: str
    planned_ms: float
    measured_ms: float
    speedup: float
    plan_wait_ms: float
    skipped: bool = False

    @classmethod
    def of(cls, event: StepEvent, planned: PlannedBatch, steps: int) -> StepView:
        """The view of a step that is done, of `steps` in all."""
        return cls(
            step=event.step,
            steps=steps,
            loss=event.loss,
            tokens_per_s=event.tokens / event.step_s if event.step_s > 0 else 0.0,
            plan=planned.plan.summary,
            planned_ms=event.planned_s * 1e3,
            measured_ms=event.step_s * 1e3,
            speedup=planned.speedup,
            plan_wait_ms=event.plan_wait_s * 1e3,
            skipped=event.skipped,
        )


class Display:
    """Shows a run on stdout, or on a console that is given."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._is_live = self._console.is_terminal and not self._console.is_dumb_terminal
        self._recent: deque[StepView] = deque(maxlen=_ROWS)
        self._progress = Progress(
            TextColumn("[bold]step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            expand=True,
        )
        self._starting = Spinner("dots", "starting")
        self._task = self._progress.add_task("", total=None)
        self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=4)

    def __enter__(self) -> Self:
        if self._is_live:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._live.stop()

    def message(self, text: str) -> None:
        """Print a line of its own, above the progress."""
        self._console.print(Text(text), soft_wrap=True)

    def step(self, view: StepView) -> None:
        """Show a step that is done."""
        self._recent.append(view)
        self._progress.update(self._task, completed=view.step, total=view.steps)
        if not self._is_live:
            self.message(_line(view))
        if view.skipped:
            self.message(
                f"step {view.step} skipped: its gradient is not finite, so nothing was changed"
            )

    def _render(self) -> RenderableType:
        if not self._recent:
            return self._starting
        return Group(_table(self._recent), self._progress)


def _line(view: StepView) -> str:
    """One step as plain text, the plan last: it may be long."""
    width = len(str(view.steps))
    return (
        f"step {view.step:{width}}/{view.steps}  loss {_loss(view)}  {_rate(view)} tokens/s  "
        f"{view.measured_ms:.0f} ms (planned {view.planned_ms:.0f})  "
        f"{view.speedup:.2f}x over one degree  plan wait {view.plan_wait_ms:.1f} ms  "
        f"plan {view.plan}"
    )


def _table(views: deque[StepView]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), expand=True, header_style="dim")
    for name in ("step", "loss", "tokens/s", "ms", "planned", "speed-up", "wait ms"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("plan", ratio=1, no_wrap=True, overflow="ellipsis")
    for view in views:
        last = view is views[-1]
        table.add_row(
            str(view.step),
            _loss(view),
            _rate(view),
            f"{view.measured_ms:.0f}",
            f"{view.planned_ms:.0f}",
            f"{view.speedup:.2f}x",
            f"{view.plan_wait_ms:.1f}",
            Text(view.plan, style="bold cyan" if last else "cyan"),
            style="bold" if last else "",
        )
    return table


def _loss(view: StepView) -> str:
    return f"{view.loss:.4f}" if math.isfinite(view.loss) else "-"


def _rate(view: StepView) -> str:
    return f"{view.tokens_per_s:,.0f}"
