"""The checkpoints of a run: folders `step-00000020`, on this machine or behind an fsspec URL.

The ranks write their shards into one (actors/checkpoint.py); when all have, the driver adds
`state.json`: a folder that has it is whole, whatever else is there. On a local file system it is
also written under another name and renamed then. The newest whole ones are kept.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

import fsspec
from fsspec.implementations.local import LocalFileSystem

from flexray.config import Config
from flexray.datasets.locations import is_url
from flexray.errors import UserError

FORMAT = 1
MARKER = "state.json"
_NAME = re.compile(r"step-(\d{8,})(?:\.unfinished)?")


@dataclass(frozen=True)
class RunState:
    """What the driver needs to go on after `step`, beside what the ranks have saved.

    Attributes:
        step: the last step trained.
        sampler: the cursor after that step, not after what was dealt ahead; it knows the corpora.
        counters: the engine's, the same on every rank.
        learned: coefficients of the cost model that were fitted to measured times.
        config: the run's, resolved.
        model: its Hugging Face configuration as config.json has it.
        world: ranks that saved it; any number may load it.
        wandb_run_id: under which Weights & Biases goes on.
    """

    step: int
    sampler: dict[str, Any]
    counters: dict[str, int]
    learned: dict[str, Any]
    config: dict[str, Any]
    model: dict[str, Any]
    world: int
    wandb_run_id: str | None
    format: int = FORMAT

    @classmethod
    def from_json(cls, text: bytes, source: str) -> Self:
        """Raises UserError for what is not a state of this format."""
        try:
            data = json.loads(text)
            if data["format"] != FORMAT:
                raise UserError(
                    f"{source}: format {data['format']}, and this FlexRay reads {FORMAT}: use the "
                    "FlexRay that wrote it"
                )
            return cls(**{field.name: data[field.name] for field in fields(cls)})
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{source}: not the state of a run ({error!r})") from None

    def to_json(self) -> str:
        """The content of `state.json`."""
        return json.dumps(asdict(self), allow_nan=False, indent=1) + "\n"


@dataclass(frozen=True)
class Checkpoint:
    """A whole one: where the shards are, and the driver's state."""

    location: str
    state: RunState


class CheckpointFolder:
    """The folder of one run's checkpoints."""

    def __init__(self, root: str) -> None:
        """`root`: a local folder or an fsspec URL; it need not be there yet."""
        try:
            remote = is_url(root)
            self.root = root.rstrip("/") if remote else str(Path(root).expanduser().absolute())
            self._fs, self._path = fsspec.core.url_to_fs(self.root, use_listings_cache=False)
        except (ImportError, ValueError, RuntimeError) as error:  # the last: ~NOBODY
            raise UserError(f"checkpoints in {root}: {' '.join(str(error).split())}") from None
        self.is_local = isinstance(self._fs, LocalFileSystem)  # file:// too

    @classmethod
    def of(cls, config: Config, run: Path) -> CheckpointFolder:
        """Where a run keeps them: `checkpoint.dir`/NAME, or `checkpoints` in its own folder."""
        given = config.checkpoint.dir
        return cls(str(run / "checkpoints") if given is None else f"{given.rstrip('/')}/{run.name}")

    def steps(self) -> list[int]:
        """Steps with a whole checkpoint, ascending."""
        found = {step for _, step in self._folders()}
        return sorted(step for step in found if self._fs.exists(self._marker(step)))

    def _folders(self) -> list[tuple[str, int]]:
        """Path and step of every checkpoint, whole or not."""
        try:
            paths = self._fs.ls(self._path, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except Exception as error:  # each file system raises its own
            raise UserError(f"{self.root}: cannot list: {' '.join(str(error).split())}") from None
        matches = [(path, _NAME.fullmatch(path.rstrip("/").rpartition("/")[2])) for path in paths]
        return [(path, int(match[1])) for path, match in matches if match]

    def newest(self) -> Checkpoint | None:
        """The newest whole checkpoint."""
        steps = self.steps()
        return self.read(steps[-1]) if steps else None

    def read(self, step: int) -> Checkpoint:
        """The whole checkpoint of `step`. Raises UserError."""
        try:
            text = self._fs.cat_file(self._marker(step))
        except FileNotFoundError:
            raise UserError(
                f"{self.root}: no checkpoint of step {step}: there are {self.steps()}"
            ) from None
        except Exception as error:  # each file system raises its own
            raise UserError(f"{self.root}: cannot read: {' '.join(str(error).split())}") from None
        location = f"{self.root}/{_name(step)}"
        return Checkpoint(location, RunState.from_json(text, f"{location}/{MARKER}"))

    @contextmanager
    def token(self) -> Iterator[Path | None]:
        """An empty file in the folder, to see who else sees it; None where it is a URL.

        A rank that does not would keep shards of its own, and no checkpoint would be whole.
        """
        if not self.is_local:
            yield None
            return
        root = Path(self._path)
        try:
            root.mkdir(parents=True, exist_ok=True)
            for left in root.glob("seen-*"):  # by a driver that was killed
                left.unlink(missing_ok=True)
            handle, name = tempfile.mkstemp(prefix="seen-", dir=root)
        except OSError as error:
            raise UserError(
                f"{error.filename}: cannot write checkpoints: {error.strerror}"
            ) from None
        os.close(handle)
        try:
            yield Path(name)
        finally:
            Path(name).unlink(missing_ok=True)

    def begin(self, step: int) -> str:
        """Where the ranks are to write `step`: an empty place, so that nothing old is mixed in."""
        for name in {_name(step), self._unfinished(step)}:
            self._remove(f"{self._path}/{name}")
        self._fs.makedirs(self._path, exist_ok=True)
        return f"{self.root}/{self._unfinished(step)}"

    def publish(self, state: RunState) -> Checkpoint:
        """Marks what the ranks have written as whole."""
        folder = f"{self._path}/{self._unfinished(state.step)}"
        if self.is_local:
            _write_durably(Path(folder) / MARKER, state.to_json())
            Path(folder).rename(f"{self._path}/{_name(state.step)}")
            _sync(Path(self._path))
        else:
            self._fs.pipe_file(f"{folder}/{MARKER}", state.to_json().encode())
        return Checkpoint(f"{self.root}/{_name(state.step)}", state)

    def prune(self, keep: int, step: int) -> None:
        """Removes all but the newest `keep` and `step`, which was just published.

        Also what a run that was killed has left unfinished: nothing else is being written now.
        """
        kept = {_name(step) for step in (*self.steps()[-keep:], step)}
        for path, _ in self._folders():
            if path.rstrip("/").rpartition("/")[2] not in kept:
                self._remove(path)

    def _remove(self, folder: str) -> None:
        """The marker first: what is half removed is not whole."""
        for path, recursive in ((f"{folder}/{MARKER}", False), (folder, True)):
            if self._fs.exists(path):
                self._fs.rm(path, recursive=recursive)

    def _marker(self, step: int) -> str:
        return f"{self._path}/{_name(step)}/{MARKER}"

    def _unfinished(self, step: int) -> str:
        # To rename on an object store is to copy; there the marker alone says what is whole.
        return f"{_name(step)}.unfinished" if self.is_local else _name(step)


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _write_durably(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    _sync(path.parent)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
