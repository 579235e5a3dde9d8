"""Tables of the benchmark of training, and what was to be reached."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from flexray.jobs.tables import Goal, Row, goal_rows, section
from flexray.jobs.training_parts import (
    CONVERGING,
    LEARNING,
    SLOW_RANKS,
    SPEED,
    WAYS,
    Compared,
    Converged,
    SlowRank,
)
from flexray.jobs.training_turns import ADAPTIVE, FLEXRAY, STATIC
from flexray.solver.cost import CostModel

NAMES = {FLEXRAY: "FlexRay", STATIC: "(a) static degree", ADAPTIVE: "(b) best single degree"}


@dataclass(frozen=True)
class Figures:
    """All that was measured.

    `slept`: where compute is emulated. `load`: of the machine in the minute before each part began.
    """

    compared: Sequence[Compared]
    converged: Converged
    slow: SlowRank
    slept: CostModel
    load: Sequence[float]


def goals(figures: Figures) -> Iterator[Goal]:
    """What was to be reached, with what was."""
    for one in figures.compared:
        where = _where(one)
        least = 1.4 if one.is_emulated else 1.1
        yield Goal(f"{where}: over the static degree", one.speedup(STATIC), least, "x", True)
        if one.is_emulated:
            over = one.speedup(ADAPTIVE)
            yield Goal(f"{where}: over the best single degree", over, 1.1, "x", True)
            yield Goal(f"{where}: off what was planned", one.off, 0.05, "%")
    yield Goal(
        f"three times wrong: off after {CONVERGING} steps", figures.converged.after, 0.10, "%"
    )
    found = figures.slow.found
    steps = float("inf") if found is None else found
    yield Goal("slow rank: steps until it is planned with", steps, LEARNING, "steps")
    yield Goal("slow rank: over the best possible", figures.slow.over_best, 0.15, "%")


def report(figures: Figures) -> str:
    """Everything as Markdown."""
    load = ", ".join(f"{load:.1f}" for load in figures.load)
    emulated = [one for one in figures.compared if one.is_emulated]
    real = [one for one in figures.compared if not one.is_emulated]
    return "\n".join(
        [
            f"*{platform.machine()}, {os.cpu_count()} cores, gloo; load of the machine in the "
            f"minute before each part: {load}.*",
            "",
            section("Two ranks with a core each, real compute", _compared(real)),
            section("From a cost model that is three times wrong", _converged(figures.converged)),
            section("More ranks than cores, emulated compute", _compared(emulated)),
            section("One of four ranks half as fast, emulated compute", _slow(figures.slow)),
            section("What a step costs", _costs(figures)),
            section("Goals", goal_rows(goals(figures))),
        ]
    )


def _where(one: Compared) -> str:
    return f"{one.corpus}, {one.ranks} ranks"


def _compared(each: Iterable[Compared]) -> Iterator[Row]:
    yield (
        "lengths, ranks",
        "batches",
        *(f"{NAMES[way]}, s a step" for way in WAYS),
        "over (a): measured, planned",
        "over (b): measured, planned",
        "FlexRay off its plans",
    )
    for one in each:
        yield (
            _where(one),
            str(one.batches),
            *(f"{one.taken_s[way]:.3f}" for way in WAYS),
            *(f"{one.speedup(way):.2f}x, {one.planned_speedup(way):.2f}x" for way in WAYS[1:]),
            f"{one.off:.1%}",
        )


def _converged(converged: Converged) -> Iterator[Row]:
    yield "steps", "off what was planned"
    yield f"1 to {CONVERGING}", f"{converged.before:.1%}"
    yield f"{CONVERGING + 1} to {CONVERGING + converged.steps}", f"{converged.after:.1%}"


def _slow(slow: SlowRank) -> Iterator[Row]:
    yield f"batches: {slow.batches}", "s a step", "over the best possible"
    yield "all ranks healthy", f"{slow.healthy_s:.3f}", "-"
    best = f"the best possible: {SLOW_RANKS} / {SPEED} of that"
    yield best, f"{slow.best_s:.3f}", "0.0%"
    yield "plans that know of the slow rank", f"{slow.aware_s:.3f}", f"{slow.over_best:.1%}"
    unaware = slow.unaware_s / slow.best_s - 1
    yield "plans that do not", f"{slow.unaware_s:.3f}", f"{unaware:.1%}"
    found = "never" if slow.found is None else str(slow.found)
    yield "steps until it is planned with", found, "-"


def _costs(figures: Figures) -> Iterator[Row]:
    yield (
        "",
        "ms per 1,000 tokens^2",
        "ms per token",
        "ms per sequence",
        "ms per micro-step",
        "MB a token exchanged",
        "MB per ms, by degree",
    )
    for one in figures.compared:
        yield _cost(f"{_where(one)}, from its reports", one.cost)
    yield _cost("measured on two ranks, and slept where compute is emulated", figures.slept)


def _cost(name: str, cost: CostModel) -> Row:
    return (
        name,
        f"{cost.quadratic * 1e6:.1f}",
        f"{cost.linear:.4f}",
        f"{cost.per_sequence:.2f}",
        f"{cost.micro_step_ms:.1f}",
        f"{cost.exchange_mb_per_token:.4f}" if cost.exchange_mb_per_token else "-",
        # Where what is exchanged makes no difference the fit finds no limit.
        ", ".join(
            f"{d}: {speed:.2f}" if speed < 1e6 else f"{d}: no limit"
            for d, speed in cost.bandwidth
            if d > 1
        )
        or "-",
    )
