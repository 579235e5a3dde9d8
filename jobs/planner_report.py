"""Tables and plots of the planner's benchmark, from whatever results there are."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from flexray.errors import UserError
from flexray.jobs.planner_cases import (
    BASELINES,
    BATCHES,
    BOUNDS,
    DATA,
    EFFORTS,
    FLEXRAY,
    GPUS,
    LIMITS,
    LONG,
    MODELS,
    OFFICIAL,
    PAPER_METHODS,
    SEQUENCES,
    Case,
    Result,
    Results,
    paper_case,
)

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"

# What the sums over the official solver's batches were to reach, as a share of its own.
TARGET = {
    ("wikipedia", 2): 0.925,
    ("wikipedia", 1): 0.905,
    ("github", 2): 0.92,
    ("github", 1): 0.91,
}
# Wang et al., ASPLOS 2025, 64 A100-40GB, measured end to end: FlexSP over DeepSpeed, over Megatron.
PUBLISHED = {
    ("github", MODELS[0], LIMITS[0]): (1.45, 1.43),
    ("github", MODELS[1], LIMITS[0]): (1.40, 1.38),
    ("github", MODELS[2], LIMITS[0]): (1.44, 1.44),
    ("github", MODELS[0], LIMITS[1]): (1.26, 1.47),
    ("github", MODELS[1], LIMITS[1]): (1.29, 1.63),
    ("github", MODELS[2], LIMITS[1]): (1.22, 1.40),
    ("wikipedia", MODELS[0], LIMITS[0]): (1.72, 1.98),
    ("wikipedia", MODELS[1], LIMITS[0]): (1.59, 1.79),
    ("wikipedia", MODELS[2], LIMITS[0]): (1.64, 1.95),
    ("wikipedia", MODELS[0], LIMITS[1]): (1.46, 1.77),
    ("wikipedia", MODELS[1], LIMITS[1]): (1.43, 1.77),
    ("wikipedia", MODELS[2], LIMITS[1]): (1.53, 1.85),
}


def tables(results: Results) -> str:
    """All tables as Markdown; cells that were not run are left out or marked."""
    machine = f"{platform.machine()}, {os.cpu_count()} cores, one process and thread"
    sections = [
        _section("Against the official solver", _official(results)),
        _section("Against other ways to plan, and what each part gives", _methods(results)),
        _section("How far from the best possible", _gaps(results)),
        _section("How planning time grows", _growth(results)),
        _section("The paper's table", _paper(results)),
    ]
    return "\n".join([f"*Planned times, on {machine}.*", "", *sections])


def fill(document: Path, text: str) -> None:
    """Puts the tables between the document's markers. Raises UserError if it has none."""
    page = document.read_text()
    if BEGIN not in page or END not in page:
        raise UserError(f"{document}: no lines {BEGIN} and {END} to put the figures between")
    head, rest = page.split(BEGIN, 1)
    document.write_text(f"{head}{BEGIN}\n{text}\n{END}{rest.split(END, 1)[1]}")


def _section(title: str, rows: Iterator[Sequence[str]]) -> str:
    lines = list(rows)
    if len(lines) < 2:
        return f"### {title}\n\nNot run yet.\n"
    head, *body = lines
    rule = ["---"] * len(head)
    return "\n".join(
        [f"### {title}", "", *("| " + " | ".join(row) + " |" for row in (head, rule, *body)), ""]
    )


def _there(results: Results, cases: Iterable[Case]) -> list[Result] | None:
    """The results of all cases, or None if one is missing."""
    wanted = list(cases)
    if not wanted or any(case not in results for case in wanted):
        return None
    return [results[case] for case in wanted]


def _mean(found: Sequence[Result], value: Callable[[Result], float]) -> float:
    return float(np.mean([value(result) for result in found]))


def _bound(results: Results, case: Case) -> Result | None:
    """The best tight bound of a case's batch that was computed."""
    cases = [replace(case, method=method) for method in BOUNDS]
    found = [results[bound] for bound in cases if bound in results]
    return max(found, key=lambda result: result["bound_ms"], default=None)


def _gap(results: Results, case: Case) -> float | None:
    bound = _bound(results, case)
    return results[case]["planned_ms"] / bound["bound_ms"] - 1 if bound else None


def _seconds(found: Sequence[Result], clock: str) -> str:
    """Median and 95th percentile."""
    times = [result[clock] for result in found]
    return f"{np.median(times):.2f}, {np.percentile(times, 95):.2f}"


def _official(results: Results) -> Iterator[Sequence[str]]:
    yield (
        "data",
        "degrees",
        "lengths",
        "sum, ms",
        "of the official solver's",
        "goal",
        "best of ten minutes",
        "tight bound",
        "mean gap",
    )
    for (data, first), target in TARGET.items():
        official = sum(OFFICIAL[data].values())
        for padded in (True, False):
            cases = [Case(data, batch, FLEXRAY, first, padded) for batch in OFFICIAL[data]]
            found = _there(results, cases)
            if not found:
                continue
            total = sum(map(_planned, found))
            long = _there(results, [replace(case, method=LONG) for case in cases])
            bounds = [bound["bound_ms"] for c in cases if (bound := _bound(results, c))]
            gaps = [gap for c in cases if (gap := _gap(results, c)) is not None]
            bounded = len(bounds) == len(cases)
            yield (
                data,
                f"{first}-64",
                "rounded up to 128" if padded else "true",
                f"{total:,.0f}",
                f"{total / official:.4f}",
                f"{target}",
                f"{sum(map(_planned, long)) / official:.4f}" if long else "-",
                f"{sum(bounds) / official:.4f}" if bounded else "-",
                f"{np.mean(gaps):.2%}" if bounded else "-",
            )


def _methods(results: Results) -> Iterator[Sequence[str]]:
    yield (
        "data",
        "method",
        "batches",
        "mean, ms",
        "speed-up over static",
        "flexray over it, same batches",
        "planning wall s (median, 95%)",
        "CPU s",
    )
    for data in DATA:
        for method in (*BASELINES, *EFFORTS):
            batches = [
                batch
                for batch in BATCHES
                if Case(data, batch, method) in results and Case(data, batch, "static") in results
            ]
            if batches:
                found = [results[Case(data, batch, method)] for batch in batches]
                static = [results[Case(data, batch, "static")] for batch in batches]
                ours = _there(results, [Case(data, batch) for batch in batches])
                mean = _mean(found, _planned)
                yield (
                    data,
                    method,
                    str(len(batches)),
                    f"{mean:,.0f}",
                    f"{_mean(static, _planned) / mean:.2f}",
                    f"{mean / _mean(ours, _planned):.3f}" if ours else "-",
                    _seconds(found, "wall_s"),
                    _seconds(found, "cpu_s"),
                )


def _planned(result: Result) -> float:
    return float(result["planned_ms"])


def _gaps(results: Results) -> Iterator[Sequence[str]]:
    yield "data", "batches", "mean gap", "largest gap", "with the cheap bound", "tight bound, s"
    for data in DATA:
        cases = [case for batch in BATCHES if (case := Case(data, batch)) in results]
        bounds = {case: bound for case in cases if (bound := _bound(results, case))}
        if bounds:
            gaps = [results[c]["planned_ms"] / bounds[c]["bound_ms"] - 1 for c in bounds]
            plans = [results[case] for case in bounds]
            yield (
                data,
                str(len(bounds)),
                f"{np.mean(gaps):.2%}",
                f"{max(gaps):.2%}",
                f"{_mean(plans, lambda r: r['planned_ms'] / r['bound_ms'] - 1):.2%}",
                _seconds(list(bounds.values()), "wall_s"),
            )


def _growth(results: Results) -> Iterator[Sequence[str]]:
    yield "GPUs", *(f"{n:,} sequences" for n in SEQUENCES)
    for gpus in GPUS:
        cells = [Case("wikipedia", 0, gpus=gpus, sequences=n) for n in SEQUENCES]
        if any(case in results for case in cells):
            yield (
                f"{gpus:,}",
                *(f"{results[c]['wall_s']:.2f} s" if c in results else "-" for c in cells),
            )


def _paper(results: Results) -> Iterator[Sequence[str]]:
    yield (
        "model",
        "data",
        "limit",
        "published, over DeepSpeed",
        "over Megatron-LM",
        *(f"{method} over static (batches)" for method in PAPER_METHODS[1:]),
        "flexray over FlexSP two-stage, same batches",
    )
    for preset in MODELS:
        for limit in LIMITS:
            for data in DATA:
                cells = [
                    _paper_cell(results, data, limit, preset, method, "static")
                    for method in PAPER_METHODS[1:]
                ]
                cells.append(_paper_cell(results, data, limit, preset, FLEXRAY, "FlexSP two-stage"))
                if any(cell != "-" for cell in cells):
                    published = PUBLISHED[data, preset, limit]
                    yield (
                        preset.removesuffix("-a100-40g"),
                        data,
                        f"{limit // 1000}K",
                        *(f"{speedup:.2f}" for speedup in published),
                        *cells,
                    )


def _paper_cell(
    results: Results, data: str, limit: int, preset: str, method: str, other: str
) -> str:
    """Speed-up over another method, on the batches that have both."""
    pairs = [
        (results[mine], results[theirs])
        for batch in BATCHES
        if (mine := paper_case(data, limit, preset, method, batch)) in results
        and (theirs := paper_case(data, limit, preset, other, batch)) in results
    ]
    if not pairs:
        return "-"
    mine, theirs = (sum(r["planned_ms"] for r in column) for column in zip(*pairs, strict=True))
    return f"{theirs / mine:.2f} ({len(pairs)})"


def plots(results: Results, folder: Path) -> None:
    """Writes planner-growth.svg and planner-gap.svg, as far as their results are there."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    style = {"svg.hashsalt": "flexray", "font.size": 10, "axes.spines.top": False}
    with rc_context(style | {"axes.spines.right": False}):
        growth = Figure(figsize=(7, 4), layout="constrained")
        axes = growth.add_subplot()
        for gpus in GPUS:
            cells = [(n, Case("wikipedia", 0, gpus=gpus, sequences=n)) for n in SEQUENCES]
            points = [(n, results[case]["wall_s"]) for n, case in cells if case in results]
            if points:
                axes.loglog(*zip(*points, strict=True), marker="o", label=f"{gpus:,} GPUs")
        axes.set(xlabel="sequences in the batch", ylabel="planning time, s")
        axes.set_xticks(SEQUENCES, [f"{n:,}" for n in SEQUENCES])
        axes.legend(frameon=False)
        growth.savefig(folder / "planner-growth.svg", metadata={"Date": None})

        gap = Figure(figsize=(7, 3.5), layout="constrained")
        axes = gap.add_subplot()
        for data in DATA:
            cells = [(b, case) for b in BATCHES if (case := Case(data, b)) in results]
            gaps = [(b, _gap(results, case)) for b, case in cells]
            points = [(b, gap * 100) for b, gap in gaps if gap is not None]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", label=data)
        axes.set(xlabel="batch", ylabel="plan over tight bound, %", ylim=(0, None))
        axes.legend(frameon=False)
        gap.savefig(folder / "planner-gap.svg", metadata={"Date": None})
