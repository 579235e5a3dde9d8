"""The folder of one run: config, events, plans, checkpoints, traces, and what W&B keeps."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from flexray.config import Config
from flexray.errors import UserError


@dataclass(frozen=True)
class RunDirectory:
    """`path` is `<run.dir>/<run.name>`."""

    path: Path

    @classmethod
    def create(cls, parent: Path, name: str | None) -> RunDirectory:
        """Make the folder of a new run.

        Args:
            parent: Folder of all runs, made when it is not there.
            name: The run's name, or None for a time stamp (with a number where two runs start in
                the same second).

        Raises:
            UserError: There is a run of that name, or the folder cannot be made.
        """
        try:
            parent.mkdir(parents=True, exist_ok=True)
            for candidate in [name] if name else _time_stamps():
                try:
                    (parent / candidate).mkdir()
                except FileExistsError:
                    continue
                return cls(parent / candidate)
        except OSError as error:
            raise UserError(
                f"{error.filename}: cannot make this folder: {error.strerror}"
            ) from None
        raise UserError(f"{parent / str(name)} is there already: choose another run.name")

    @classmethod
    def open(cls, parent: Path, name: str) -> RunDirectory:
        """The folder of a run that goes on; made where only its checkpoints are left.

        Raises:
            UserError: The folder cannot be made.
        """
        try:
            (parent / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"{error.filename}: cannot make this folder: {error.strerror}"
            ) from None
        return cls(parent / name)

    @property
    def name(self) -> str:
        """The run's name."""
        return self.path.name

    @property
    def config_path(self) -> Path:
        """The resolved config."""
        return self.path / "config.yaml"

    @property
    def events_path(self) -> Path:
        """What happened, one JSON object a line (docs/events.md)."""
        return self.path / "events.jsonl"

    @property
    def plans_path(self) -> Path:
        """Every plan with its step, one JSON object a line (docs/events.md)."""
        return self.path / "plans.jsonl"

    @property
    def scale_path(self) -> Path:
        """A request for another number of GPUs (scaling.py)."""
        return self.path / "scale.json"

    @property
    def is_held(self) -> bool:
        """Whether a process trains this run now."""
        try:
            with self.held():
                return False
        except UserError:
            return True

    @contextmanager
    def held(self) -> Iterator[None]:
        """Holds the folder for the process that trains; the system lets go of it with the process.

        Raises:
            UserError: Another process trains this run.
        """
        folder = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(folder)
            raise UserError(
                f"{self.path}: this run is training now, in another process: stop that first"
            ) from None
        try:
            yield
        finally:
            os.close(folder)

    def write_config(self, config: Config) -> None:
        """Write the resolved config, under this run's name; others may be reading it."""
        new = self.config_path.with_name("config.yaml.new")
        new.write_text(config.named(self.name).to_yaml())
        new.replace(self.config_path)


def _time_stamps() -> Iterator[str]:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    yield stamp
    for number in count(2):
        yield f"{stamp}-{number}"
