"""Plans as values: a step is micro-steps, a micro-step disjoint groups, a group ranks and rows.

A plan is plain data that the planner makes, the verifier checks, the driver sends and the actors
read. Times are milliseconds, lengths are tokens, rows are positions in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any


class PlanningError(ValueError):
    """What cannot be planned: one line that says which row or setting, and what to change."""


@dataclass(frozen=True)
class Dropped:
    """A row that is in no group, with the reason."""

    row: int
    length: int
    why: str


@dataclass(frozen=True)
class Group:
    """`degree` ranks that share one pack.

    Attributes:
        degree: sequence-parallel degree, equal to `len(ranks)`.
        ranks: ascending ranks, `(degree,)`.
        rows: positions in the batch, `(sequences,)`, never empty.
        lengths: true lengths of those rows, `(sequences,)`.
        planned_ms: time of the group's own work (compute, all-to-all), without the
            micro-step's fixed cost.
    """

    degree: int
    ranks: tuple[int, ...]
    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    planned_ms: float

    @property
    def tokens(self) -> int:
        """Tokens of the pack, before it is padded to a multiple of the degree."""
        return sum(self.lengths)


@dataclass(frozen=True)
class MicroStep:
    """Groups that run side by side; ranks in none of them are idle.

    `planned_ms` is the slowest group's time plus the fixed cost of a micro-step.
    """

    groups: tuple[Group, ...]
    planned_ms: float


@dataclass(frozen=True)
class Plan:
    """The micro-steps of one training step.

    Attributes:
        micro_steps: in the order in which they run, longest first.
        planned_ms: sum of the micro-steps' times.
        lower_bound_ms: no plan of this batch is shorter than this.
        solve_s: wall time of the planner; not part of a plan's identity.
        method: which part of the planner found it.
        dropped: rows that no group has (zero-length ones).
    """

    micro_steps: tuple[MicroStep, ...]
    planned_ms: float
    lower_bound_ms: float
    solve_s: float = field(compare=False)
    method: str
    dropped: tuple[Dropped, ...] = ()

    @property
    def gap(self) -> float:
        """How far the plan is from the bound: 0.02 says that no plan is over 2% better or so."""
        return self.planned_ms / self.lower_bound_ms - 1 if self.lower_bound_ms > 0 else 0.0

    @property
    def degrees(self) -> list[list[int]]:
        """Degrees of each micro-step, descending: `[[4], [2, 1, 1]]`."""
        return [sorted((g.degree for g in m.groups), reverse=True) for m in self.micro_steps]

    @property
    def summary(self) -> str:
        """Degrees on one line: `4 | 2 1 1`; from three equal ones on `8x4` is four groups of 8."""
        return " | ".join(_short(degrees) for degrees in self.degrees)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form that `flexray plan --json` prints and run directories hold."""
        return {
            "planned_ms": self.planned_ms,
            "lower_bound_ms": self.lower_bound_ms,
            "gap": self.gap,
            "solve_s": self.solve_s,
            "method": self.method,
            "dropped": [{"row": d.row, "length": d.length, "why": d.why} for d in self.dropped],
            "micro_steps": [
                {
                    "planned_ms": m.planned_ms,
                    "groups": [
                        {
                            "degree": g.degree,
                            "ranks": list(g.ranks),
                            "rows": list(g.rows),
                            "lengths": list(g.lengths),
                            "tokens": g.tokens,
                            "planned_ms": g.planned_ms,
                        }
                        for g in m.groups
                    ],
                }
                for m in self.micro_steps
            ],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Plan:
        """The inverse of `to_dict`."""
        return cls(
            micro_steps=tuple(
                MicroStep(
                    tuple(
                        Group(
                            g["degree"],
                            tuple(g["ranks"]),
                            tuple(g["rows"]),
                            tuple(g["lengths"]),
                            g["planned_ms"],
                        )
                        for g in m["groups"]
                    ),
                    m["planned_ms"],
                )
                for m in data["micro_steps"]
            ),
            planned_ms=data["planned_ms"],
            lower_bound_ms=data["lower_bound_ms"],
            solve_s=data["solve_s"],
            method=data["method"],
            dropped=tuple(Dropped(d["row"], d["length"], d["why"]) for d in data["dropped"]),
        )


def _short(degrees: Sequence[int]) -> str:
    words: list[str] = []
    for degree, run in groupby(degrees):
        count = len(list(run))
        words += [str(degree)] * count if count < 3 else [f"{degree}x{count}"]
    return " ".join(words)
