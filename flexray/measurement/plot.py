"""The picture of a fit: what was measured against what the model predicts."""

from __future__ import annotations

from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from flexray.gantt import degree_colour
from flexray.measurement.fit import Fit

_INK = "#24292f"


def draw_fit(fit: Fit, caption: str, path: Path) -> None:
    """A panel for compute, all-to-all and whole steps; colours are degrees. Writes an .svg."""
    kinds = list(dict.fromkeys(point.kind for point in fit.points))
    figure = Figure(figsize=(3.6 * len(kinds), 3.9), layout="constrained")
    panels = figure.subplots(1, len(kinds), squeeze=False)[0]
    for axes, kind in zip(panels, sorted(kinds), strict=True):
        points = [p for p in fit.points if p.kind == kind]
        times = [t for p in points for t in (p.predicted_ms, p.measured_ms)]
        ends = (0.8 * min(times), 1.25 * max(times))
        axes.plot(ends, ends, color="#c9ced6", linewidth=1, zorder=1)
        for degree in sorted({p.degree for p in points}):
            own = [p for p in points if p.degree == degree]
            axes.scatter(
                [p.predicted_ms for p in own],
                [p.measured_ms for p in own],
                s=16,
                color=degree_colour(degree),
                label=f"degree {degree}",
                zorder=2,
            )
        axes.set_xscale("log")
        axes.set_yscale("log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axis.set_major_formatter(lambda ms, _: f"{ms:g}")
            axis.set_minor_locator(NullLocator())
        axes.set_title(kind, fontsize=10, color=_INK)
        axes.set_xlabel("predicted, ms", fontsize=9.5, color=_INK)
        axes.tick_params(colors=_INK, labelsize=8)
        axes.legend(frameon=False, fontsize=8, labelcolor=_INK)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    panels[0].set_ylabel("measured, ms", fontsize=9.5, color=_INK)
    figure.supxlabel(caption, x=0.01, ha="left", fontsize=8, color="#6b7280")
    with rc_context({"svg.hashsalt": "flexray"}):
        figure.savefig(path, format="svg", metadata={"Date": None})
