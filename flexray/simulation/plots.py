"""The pictures of a simulation. The same results give the same files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, NullLocator

from flexray.gantt import degree_colour, draw_step
from flexray.length_source import Lengths
from flexray.simulation.folder import SimulationFolder
from flexray.simulation.strategies import BASELINE, STRATEGIES, StepResult
from flexray.simulation.study import Study
from flexray.simulation.summary import StrategySummary, median_and_slowest

_INK = "#24292f"
_PALE = "#c9ced6"
_OURS = "#b33f6e"
_PARTS = {
    "compute": "#4a2a78",
    "all-to-all": "#d95f57",
    "parameter collectives": "#f9b864",
    "idle": "#e4e7ec",
}
_OTHER = "#8a8f98"


def draw_all(
    study: Study,
    summaries: Sequence[StrategySummary],
    by_size: Mapping[int, Sequence[StrategySummary]],
    shown: Sequence[StepResult],
    what: str,
    folder: SimulationFolder,
) -> None:
    """Every picture of a study.

    Args:
        shown: the steps of the strategy whose steps are drawn, one a batch.
        what: how it was simulated, for the captions.
    """
    data = f"batches of {study.batches.size} rows of up to {study.batches.longest:,} tokens"
    caption = f"{what}: {study.cluster.gpus} GPUs, {len(study.batches.lengths)} {data}"
    draw_speedups(summaries, caption, folder.plot("speedup"))
    lengths = np.concatenate(study.batches.lengths)
    degrees = np.concatenate([r.row_degrees for r in shown])
    strategy, has_tokens = shown[0].strategy, lengths > 0
    path = folder.plot("lengths")
    draw_lengths(lengths[has_tokens], degrees[has_tokens], strategy, caption, path)
    if by_size:
        few = f"{what}: only the first {study.steps_of_a_size} {data}, the same on every size"
        draw_cluster_sizes(by_size, few, folder.plot("cluster-sizes"))
    for name, step in zip(("step-median", "step-slowest"), median_and_slowest(shown), strict=True):
        case = next(case for _, case in study.tasks if case.batch == step.batch)
        draw_step(STRATEGIES[strategy](case), study.cluster, folder.plot(name))


def draw_speedups(summaries: Sequence[StrategySummary], what: str, path: Path) -> None:
    """Speed-up over static of each strategy, and where the GPUs' time goes.

    Args:
        what: what was simulated, for the caption.
    """
    names = [s.strategy for s in summaries]
    figure = Figure(figsize=(9.0, 1.5 + 0.42 * len(names)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(2, 3))
    speedups = [s.speedup for s in summaries]
    colours = [_OURS if name == "flexray" else _PALE for name in names]
    bars = left.barh(names, speedups, color=colours, height=0.66)
    left.bar_label(bars, [f"{x:.2f}x" for x in speedups], padding=4, fontsize=9, color=_INK)
    left.set_xlim(0, max(speedups) * 1.18)
    left.set_xlabel("speed-up over static", **_LABEL)
    left.invert_yaxis()

    start = np.zeros(len(names))
    for part, colour in _PARTS.items():
        seconds = np.array([s.parts_ms[part] for s in summaries]) / 1e3
        right.barh(names, seconds, left=start, color=colour, height=0.66, label=part)
        start += seconds
    right.set_xlabel("mean step time, s, by what the GPUs do", **_LABEL)
    handles, labels = right.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=4, **_LEGEND)
    for axes in (left, right):
        _clean(axes)
        axes.tick_params(axis="y", length=0)
    _save(figure, what, path)


def draw_lengths(lengths: Lengths, degrees: Lengths, who: str, what: str, path: Path) -> None:
    """Histogram of lengths on a logarithmic axis, coloured by the degree that each row got.

    Args:
        lengths: tokens, all above 0, (rows,).
        degrees: degree of each row's group, (rows,).
        who: the strategy.
        what: what was simulated, for the caption.
    """
    figure = Figure(figsize=(9.0, 4.4), layout="constrained")
    counts, tokens = figure.subplots(2, 1, sharex=True)
    low, high = np.log10(lengths.min()), np.log10(lengths.max())
    bins = np.logspace(low - 0.01, high + 0.01, 49)
    used = sorted({int(d) for d in degrees})
    by_degree = [lengths[degrees == d] for d in used]
    for axes, weights in (
        (counts, [np.ones(len(x)) for x in by_degree]),
        (tokens, [x / lengths.sum() for x in by_degree]),
    ):
        axes.hist(
            by_degree,
            bins=bins.tolist(),
            weights=weights,
            stacked=True,
            color=[degree_colour(d) for d in used],
            label=[f"degree {d}" for d in used],
        )
        _clean(axes)
    counts.set_ylabel("rows", **_LABEL)
    tokens.set_ylabel("share of tokens", **_LABEL)
    tokens.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    tokens.set_xscale("log")
    tokens.xaxis.set_major_formatter(EngFormatter(sep=""))
    tokens.set_xlabel(f"length in tokens; colour: the group that {who} gives the row", **_LABEL)
    handles, labels = counts.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=8, **_LEGEND)
    _save(figure, what, path)


def draw_cluster_sizes(
    by_size: Mapping[int, Sequence[StrategySummary]], what: str, path: Path
) -> None:
    """Speed-up over static against the number of GPUs.

    Args:
        by_size: GPUs, ascending -> the same strategies.
        what: what was simulated, for the caption.
    """
    figure = Figure(figsize=(9.0, 3.4), layout="constrained")
    axes = figure.add_subplot()
    sizes = list(by_size)
    for strategies in zip(*by_size.values(), strict=True):
        name = strategies[0].strategy
        if name == BASELINE:
            continue
        colour = _OURS if name == "flexray" else _OTHER
        speedups = [s.speedup for s in strategies]
        axes.plot(sizes, speedups, marker="o", color=colour, lw=2, clip_on=False, label=name)
        for x, y in zip(sizes, speedups, strict=True):
            axes.annotate(
                f"{y:.2f}x",
                (x, y),
                xytext=(0, 7),
                textcoords="offset points",
                ha="center",
                fontsize=8.5,
                color=colour,
            )
    axes.axhline(1, color=_INK, lw=1, ls=(0, (4, 3)), zorder=0)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.margins(y=0.15)
    axes.set_xlabel("GPUs", **_LABEL)
    axes.set_ylabel("speed-up over static", **_LABEL)
    axes.legend(loc="upper left", **_LEGEND)
    _clean(axes)
    _save(figure, what, path)


_LABEL: dict[str, Any] = {"color": _INK, "fontsize": 9.5}
_LEGEND: dict[str, Any] = {
    "frameon": False,
    "fontsize": 8.5,
    "labelcolor": _INK,
    "handlelength": 1.2,
}


def _clean(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(colors=_INK, length=2.5, labelsize=8.5)
    axes.tick_params(which="minor", length=1.5)


def _save(figure: Figure, caption: str, path: Path) -> None:
    figure.supxlabel(caption, x=0.01, ha="left", fontsize=8, color="#6b7280")
    with rc_context({"svg.hashsalt": "flexray"}):
        figure.savefig(path, dpi=200, metadata={"Date": None} if path.suffix == ".svg" else None)
