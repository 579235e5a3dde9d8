"""What `flexray simulate` keeps: steps.jsonl, summary.json and pictures in one folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexray.errors import UserError


@dataclass(frozen=True)
class SimulationFolder:
    """The folder of one simulation, finished or not."""

    path: Path

    @classmethod
    def open(
        cls, path: Path, settings: Mapping[str, Any], overwrite: bool = False
    ) -> SimulationFolder:
        """Makes the folder, or opens that of the same simulation to go on.

        Args:
            settings: all that the results depend on, as JSON.
            overwrite: throw away what another simulation left there.

        Raises:
            UserError: it holds another simulation, or cannot be made.
        """
        folder = cls(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            if overwrite:
                for file in folder.files:
                    file.unlink(missing_ok=True)
            if folder.summary_path.exists():
                folder._check(settings)
            elif folder.steps_path.exists():
                raise UserError(f"{path} holds steps without a summary: pass --overwrite")
            else:
                folder.write_summary({"finished": False, "settings": settings})
        except OSError as error:
            raise UserError(f"--out {path}: cannot be written: {error.strerror}") from None
        return folder

    @property
    def summary_path(self) -> Path:
        """Settings and figures."""
        return self.path / "summary.json"

    @property
    def steps_path(self) -> Path:
        """One JSON object a line: `flexray.simulation.strategies.StepResult`."""
        return self.path / "steps.jsonl"

    def plot(self, name: str) -> Path:
        """A picture: `speedup`, `lengths`, `cluster-sizes`, `step-median` or `step-slowest`."""
        return self.path / f"{name}.svg"

    @property
    def files(self) -> list[Path]:
        """All files that a simulation writes, there or not."""
        plots = ("speedup", "lengths", "cluster-sizes", "step-median", "step-slowest")
        return [self.summary_path, self.steps_path, *map(self.plot, plots)]

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Replaces the summary at once: it is never half-written."""
        new = self.summary_path.with_suffix(".new")
        new.write_text(json.dumps(summary, indent=2, allow_nan=False) + "\n")
        new.replace(self.summary_path)

    def _check(self, settings: Mapping[str, Any]) -> None:
        try:
            old = json.loads(self.summary_path.read_bytes())["settings"]
            differs = next((key for key in settings if old.get(key) != settings[key]), None)
        except (ValueError, TypeError, KeyError, AttributeError):
            raise UserError(
                f"{self.summary_path} is not of a simulation: pass another --out, or --overwrite"
            ) from None
        if differs is not None:
            raise UserError(
                f"{self.path} holds another simulation ({_difference(differs, old, settings)}): "
                "pass its settings to go on with it, another --out, or --overwrite"
            )


def _difference(key: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    name = key.replace("_", " ")
    if isinstance(new[key], int | str) and len(str(new[key])) < 40:
        return f"{name} was {old.get(key)} and is {new[key]}"
    return f"its {name} differ"
