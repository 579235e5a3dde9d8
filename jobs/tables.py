"""Tables of benchmarks in Markdown, and what was to be reached."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

Row = Sequence[str]


@dataclass(frozen=True)
class Goal:
    """A figure, and the least or the most that it may be."""

    name: str
    value: float
    limit: float
    unit: str  # "x", "%", "ms" or "steps"
    is_least: bool = False

    @property
    def is_reached(self) -> bool:
        """Whether it is on the right side."""
        return self.value >= self.limit if self.is_least else self.value <= self.limit

    def row(self) -> Row:
        """Of the table of goals."""
        return (
            self.name,
            _in(self.value, self.unit),
            f"{'at least' if self.is_least else 'at most'} {_in(self.limit, self.unit)}",
            "reached" if self.is_reached else "**missed**",
        )

    def __str__(self) -> str:
        name, value, limit, _ = self.row()
        return f"{name}: {value}, {limit}"


def goal_rows(goals: Iterable[Goal]) -> Iterator[Row]:
    """The table of goals."""
    yield "goal", "measured", "wanted", ""
    for goal in goals:
        yield goal.row()


def section(title: str, rows: Iterable[Row]) -> str:
    """A table in Markdown under its title; the first row is the head."""
    head, *body = rows
    lines = (head, ["---"] * len(head), *body)
    return "\n".join([f"### {title}", "", *("| " + " | ".join(row) + " |" for row in lines), ""])


def _in(figure: float, unit: str) -> str:
    if unit == "%":
        return f"{figure:.1%}"
    if unit == "x":
        return f"{figure:.2f}x"
    return f"{figure:.1f} ms" if unit == "ms" else f"{figure:.0f} {unit}"
