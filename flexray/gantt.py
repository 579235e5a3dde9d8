"""One step's plan as a picture: ranks on one axis, time on the other, groups coloured by degree."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from flexray.solver.cluster import Cluster
from flexray.solver.plan import Group, Plan

# Degrees 1, 2, 4, ...: light to dark, so that they are told apart in grey too.
_COLOURS = ("#fde0a6", "#f9b864", "#ee8a4a", "#d95f57", "#b33f6e", "#7f2f7c", "#4a2a78", "#1f2560")
_IDLE = "#f1f3f6"
_FIXED = "#dde1e8"
_INK = "#24292f"

_WIDTH = 9.0  # inches
_CHARACTER = 0.06  # inches, of a label
_GAP = 0.06  # of a rank's height, above and below a bar


def draw_step(
    plan: Plan,
    cluster: Cluster,
    path: Path,
    measured: Sequence[Sequence[float]] | None = None,
) -> None:
    """Write the picture of one step to `path`; its ending (svg, png, pdf) says how.

    The same plan gives the same file.

    Args:
        plan: The step. Times are milliseconds.
        cluster: Its ranks; dashed lines separate nodes.
        path: The file.
        measured: Milliseconds of each group as it ran, in the order of the plan,
            (micro-steps, groups): black marks where each really ended.
    """
    height = 1.5 + min(9.0, max(1.6, 0.36 * cluster.gpus))
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    axes = figure.add_subplot()
    step_ms = max(plan.planned_ms, 1e-9)
    start = 0.0
    for index, micro_step in enumerate(plan.micro_steps, 1):
        slowest = max((group.planned_ms for group in micro_step.groups), default=0.0)
        end = start + micro_step.planned_ms
        _box(axes, start, slowest, -0.5, cluster.gpus, _IDLE)
        _box(axes, start + slowest, micro_step.planned_ms - slowest, -0.5, cluster.gpus, _FIXED)
        for group in micro_step.groups:
            inches = group.planned_ms / step_ms * _WIDTH * 0.92
            _draw_group(axes, group, start, inches, cluster.gpus)
        if measured is not None:
            for group, ms in zip(micro_step.groups, measured[index - 1], strict=True):
                for first, count in _runs(group.ranks):
                    ends = [first - 0.5 + _GAP, first + count - 0.5 - _GAP]
                    axes.plot([start + ms] * 2, ends, color="black", lw=2, zorder=5)
        axes.axvline(end, color=_INK, lw=1, zorder=4)
        is_wide = micro_step.planned_ms / step_ms > 0.11
        _head(axes, f"micro-step {index}" if is_wide else str(index), (start + end) / 2)
        start = end
    _frame(axes, cluster, step_ms)
    degrees = sorted({group.degree for step in plan.micro_steps for group in step.groups})
    _legend(figure, degrees, measured is not None)
    with rc_context({"svg.hashsalt": "flexray"}):
        figure.savefig(path, dpi=200, metadata={"Date": None} if path.suffix == ".svg" else None)


def _draw_group(axes: Axes, group: Group, start: float, inches: float, ranks: int) -> None:
    colour = degree_colour(group.degree)
    runs = _runs(group.ranks)
    for first, count in runs:
        _box(axes, start, group.planned_ms, first - 0.5 + _GAP, count - 2 * _GAP, colour, zorder=2)
    first, count = max(runs, key=lambda run: run[1])
    lines = count if ranks <= 16 else count // 3
    axes.text(
        start + group.planned_ms / 2,
        first + (count - 1) / 2,
        _label(group, inches, lines),
        ha="center",
        va="center",
        fontsize=7.5,
        color="white" if sum(to_rgb(colour)) < 1.7 else _INK,
        zorder=3,
    )


def _label(group: Group, inches: float, lines: int) -> str:
    """As much as a bar of this width and so many lines has room for."""
    degree, tokens = f"SP {group.degree}", f"{group.tokens:,} tokens"
    sequences = f"{len(group.rows)} sequence{'s' if len(group.rows) > 1 else ''}"
    for rows in (
        [degree, sequences, tokens],
        [degree, tokens],
        [f"{degree} · {sequences} · {tokens}"],
        [f"{degree} · {tokens}"],
        [degree],
    ):
        if len(rows) <= lines and max(map(len, rows)) * _CHARACTER <= inches:
            return "\n".join(rows)
    return ""


def _box(
    axes: Axes, x: float, width: float, y: float, height: float, colour: str, zorder: int = 0
) -> None:
    axes.add_patch(Rectangle((x, y), width, height, facecolor=colour, lw=0, zorder=zorder))


def _head(axes: Axes, text: str, x: float) -> None:
    axes.annotate(
        text,
        (x, 1),
        xycoords=("data", "axes fraction"),
        xytext=(0, 4),
        textcoords="offset points",
        ha="center",
        fontsize=8.5,
        color=_INK,
    )


def _frame(axes: Axes, cluster: Cluster, step_ms: float) -> None:
    axes.set_xlim(0, step_ms * 1.002)
    axes.set_ylim(cluster.gpus - 0.5, -0.5)
    axes.set_xlabel("planned time, ms", color=_INK)
    axes.set_ylabel("rank", color=_INK)
    axes.set_yticks(range(0, cluster.gpus, -(-cluster.gpus // 16)))
    axes.tick_params(colors=_INK, length=2.5, labelsize=8.5)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    nodes = cluster.node_of
    for rank in range(1, cluster.gpus):
        if nodes[rank] != nodes[rank - 1]:
            axes.axhline(rank - 0.5, color=_INK, lw=0.9, ls=(0, (4, 3)), zorder=1)


def _legend(figure: Figure, degrees: list[int], has_marks: bool) -> None:
    keys = [Patch(facecolor=degree_colour(degree), label=f"degree {degree}") for degree in degrees]
    keys.append(Patch(facecolor=_IDLE, edgecolor=_FIXED, label="idle"))
    keys.append(Patch(facecolor=_FIXED, label="parameter collectives"))
    if has_marks:
        keys.append(Patch(facecolor="black", label="measured end"))
    figure.legend(
        handles=keys,
        loc="outside lower center",
        ncols=len(keys),
        frameon=False,
        fontsize=8.5,
        handlelength=1.2,
        handleheight=1.1,
        columnspacing=1.4,
        labelcolor=_INK,
    )


def _runs(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """Consecutive ranks as (first, count)."""
    runs = []
    for _, run in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0]):
        members = [rank for _, rank in run]
        runs.append((members[0], len(members)))
    return runs


def degree_colour(degree: int) -> str:
    """The colour of a degree in every picture, from light to dark."""
    return _COLOURS[min(degree.bit_length() - 1, len(_COLOURS) - 1)]
