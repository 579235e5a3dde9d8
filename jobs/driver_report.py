"""Tables of the benchmark of the driver, and what was to be reached."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flexray.jobs.driver_stubs import STEP_S
from flexray.jobs.driver_work import Real, Stubbed, calls_ms
from flexray.jobs.tables import Goal, goal_rows, section

IDLE = {4: 5.0, 16: 10.0}  # ms at most, by ranks
WORK = {16: 30.0}
HIDDEN_MS, MANY = 2000.0, 1024  # of a step, at so many ranks


@dataclass(frozen=True)
class Figures:
    """All that was measured. `load`: of the machine in the minute before each part began."""

    real: Sequence[Real]
    stubbed: Sequence[Stubbed]
    load: Sequence[float]


def goals(figures: Figures) -> Iterator[Goal]:
    """What was to be reached, with what was."""
    for one in figures.real:
        if one.ranks in IDLE:
            name = f"idle between steps, {one.ranks} ranks"
            yield Goal(name, one.idle[0], IDLE[one.ranks], "ms")
    for one in figures.real:
        if one.ranks in WORK:
            yield Goal(f"the driver's work, {one.ranks} ranks", one.cpu, WORK[one.ranks], "ms")


def report(figures: Figures) -> str:
    """Everything as Markdown."""
    load = ", ".join(f"{load:.1f}" for load in figures.load)
    return "\n".join(
        [
            f"*{platform.machine()}, {os.cpu_count()} cores; load of the machine in the minute "
            f"before each part: {load}.*",
            "",
            section(f"Light actors that sleep for {STEP_S:g} s a step", _real(figures.real)),
            section("Made-up reports, no actors", _stubbed(figures.stubbed)),
            needed(figures),
            "",
            section("Goals", goal_rows(goals(figures))),
        ]
    )


def needed(figures: Figures) -> str:
    """What it would take to hide the driver's work behind a step of many ranks."""
    own = next(one.total for one in figures.stubbed if one.ranks == MANY)
    per_rank = calls_ms(figures.real, figures.stubbed)
    calls = MANY * per_rank
    text = (
        f"A rank's calls through Ray take {per_rank:.2f} ms a step, by the growth from "
        f"{figures.real[0].ranks} to {figures.real[-1].ranks} actors; at {MANY:,} ranks that would "
        f"be {calls:,.0f} ms beside the {own:,.0f} ms above. "
    )
    if own + calls <= HIDDEN_MS:
        share = (own + calls) / HIDDEN_MS
        return text + f"Together that is {share:.0%} of a step of 2 s: hidden as it is."
    if own >= HIDDEN_MS:
        return text + (
            f"To be hidden behind a step of 2 s the driver's own work must be "
            f"{own / HIDDEN_MS:.1f} times less before anything else."
        )
    helpers = math.ceil(calls / (HIDDEN_MS - own))
    return text + (
        f"To be hidden behind a step of 2 s the calls must be shared by {helpers} processes, each "
        f"for {math.ceil(MANY / helpers)} ranks (one a node would do), or be {helpers} times "
        "cheaper."
    )


def _real(each: Sequence[Real]) -> Iterator[Sequence[str]]:
    yield (
        "ranks",
        "steps",
        "idle between steps, ms: median, 95%",
        "driver's CPU, ms a step",
        "of that the loop's thread",
    )
    for one in each:
        yield (
            str(one.ranks),
            str(one.steps),
            f"{one.idle[0]:.1f}, {one.idle[1]:.1f}",
            f"{one.cpu:.1f}",
            f"{one.main:.1f}",
        )


def _stubbed(each: Sequence[Stubbed]) -> Iterator[Sequence[str]]:
    yield (
        "ranks",
        "steps",
        "all, ms a step",
        "fit of the cost model",
        "work and reports serialised",
        "slices, records, logs",
    )
    for one in each:
        parts = (one.total, one.fit, one.carried, one.rest)
        yield (f"{one.ranks:,}", str(one.steps), *(f"{part:.1f}" for part in parts))
