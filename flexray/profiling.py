"""A torch profiler's trace of a few steps, one file a rank in the run's folder."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexray.actors.pool import Pool
from flexray.errors import UserError


@dataclass(frozen=True)
class Steps:
    """Steps `first` to `last`, both included."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> Steps:
        """`5:8` or `5`. Raises UserError."""
        match = re.fullmatch(r"([1-9]\d{0,17})(?::([1-9]\d{0,17}))?", text)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise UserError(
                f"--profile {text}: give steps such as 5:8, the last not before the first"
            )
        return cls(int(match[1]), int(match[2] or match[1]))

    def check(self, done: int, steps: int) -> None:
        """Raises UserError unless a run that goes on after `done` trains all of them."""
        if self.first <= done or self.last > steps:
            raise UserError(
                f"--profile {self.first}:{self.last}: this run trains steps {done + 1} to {steps}"
            )


class Profiler:
    """Has the ranks record `steps`, queued around them like a step."""

    def __init__(self, pool: Pool, steps: Steps | None, folder: Path) -> None:
        """`steps`: None records nothing."""
        self._pool, self._steps, self._folder = pool, steps, folder
        self._traces: list[Any] = []
        self._records = False

    def before(self, step: int) -> None:
        """Call before `step` is queued."""
        if self._steps and step == self._steps.first:
            self._pool.start_profile()
            self._records = True

    def after(self, step: int) -> None:
        """Call when `step` is queued."""
        if self._steps and step == self._steps.last and self._records:
            self._traces = self._pool.stop_profile()
            self._records = False

    def forget(self) -> None:
        """The ranks have changed: what they were recording is lost."""
        self._traces, self._records = [], False

    def done(self, step: int) -> str | None:
        """Call when `step` is done: writes the traces after the last one and says where."""
        if self._steps is None or step != self._steps.last:
            return None
        if not self._traces:
            return f"No traces of steps {self._steps.first} to {step}: the ranks changed meanwhile"
        self._folder.mkdir(exist_ok=True)
        for rank, trace in enumerate(self._pool.wait(self._traces, "profile")):
            (self._folder / f"rank-{rank}.json").write_bytes(trace)
        self._traces = []
        return (
            f"Traces of steps {self._steps.first} to {self._steps.last}: "
            f"{self._folder}/rank-*.json (open in chrome://tracing or ui.perfetto.dev)"
        )
