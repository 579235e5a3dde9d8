"""The picture of a corpus: how many rows and tokens there are of each length."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

_INK, _ROWS, _TOKENS = "#24292f", "#4a2a78", "#b33f6e"


def draw_lengths(lengths: npt.NDArray[np.integer], title: str, path: Path) -> None:
    """Histograms of rows and of tokens over a logarithmic axis of lengths.

    Args:
        lengths: (rows,) tokens of each row; rows without tokens are left out.
        path: an .svg, .png or .pdf file; the same lengths give the same file.
    """
    values, counts = np.unique(lengths[lengths > 0], return_counts=True)
    low, high = np.log10(values[0]), np.log10(values[-1])
    bins = np.logspace(low - 0.01, high + 0.01, 61).tolist()
    figure = Figure(figsize=(9.0, 4.4), layout="constrained")
    rows, tokens = figure.subplots(2, 1, sharex=True)
    rows.hist(values, bins=bins, weights=counts, color=_ROWS)
    rows.set_ylabel("rows", color=_INK)
    rows.yaxis.set_major_formatter(EngFormatter(sep=""))
    tokens.hist(values, bins=bins, weights=values * counts / lengths.sum(), color=_TOKENS)
    tokens.set_ylabel("share of tokens", color=_INK)
    tokens.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    tokens.set_xscale("log")
    tokens.xaxis.set_major_formatter(EngFormatter(sep=""))
    tokens.set_xlabel("length in tokens", color=_INK)
    for axes in (rows, tokens):
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.tick_params(colors=_INK, labelsize=8.5)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, color=_INK)
    with rc_context({"svg.hashsalt": "flexray"}):
        figure.savefig(path, dpi=200, metadata={"Date": None} if path.suffix == ".svg" else None)
