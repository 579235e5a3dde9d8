"""Going on with a run: what is resumed, which keys may differ, and what becomes of its logs.

docs/checkpoints.md says it to users.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flexray.checkpoints import Checkpoint, CheckpointFolder
from flexray.config import Config, load_config
from flexray.datasets.locations import is_url
from flexray.errors import UserError
from flexray.json_lines import JsonLinesWriter, read_json_lines
from flexray.run_directory import RunDirectory
from flexray.solver.cost import CostModel

MAY_CHANGE = (
    "run",
    "cluster",
    "model.activation_checkpointing",
    "model.attention",
    "model.loss_chunk",
    "train.steps",
    "train.validate_every",
    "train.max_nonfinite_steps",
    "planner",
    "checkpoint",
    "tracking",
)
"""Keys and sections that may differ when a run is resumed: none changes what is trained on what."""

LEARNED = ("quadratic", "linear", "per_sequence", "micro_step_ms", "exchange_ms", "bandwidth")
"""What of a cost model is fitted to measured times. The memory terms are the present cluster's."""


def locate(target: str, runs: Path) -> Checkpoint:
    """The newest whole checkpoint of what `--resume` and `export` are given.

    Args:
        target: A run's folder, its name in `runs`, or a folder or fsspec URL of checkpoints.
        runs: The folder of runs.

    Raises:
        UserError: There is no such run, or it has no whole checkpoint.
    """
    folder = CheckpointFolder(target) if is_url(target) else _named(target, runs)
    newest = folder.newest()
    if newest is None:
        raise UserError(f"{folder.root}: there is no whole checkpoint yet")
    return newest


def run_folder(target: str, runs: Path) -> Path | None:
    """The run's own folder, if `target` is one or names one in `runs`."""
    if is_url(target):
        return None
    for path in (os.path.expanduser(target), runs / target):  # noqa: PTH111
        # Of os.path: the methods of Path raise for ~NOBODY and for a name that is too long.
        if os.path.isfile(os.path.join(path, "config.yaml")):  # noqa: PTH113, PTH118
            return Path(path)
    return None


def _named(target: str, runs: Path) -> CheckpointFolder:
    run = run_folder(target, runs)
    if run is not None:
        return _of_run(RunDirectory(run))
    folder = CheckpointFolder(target)
    if not folder.steps():
        raise UserError(
            f"{target}: neither a run's folder, nor a run in {runs}, nor a folder of checkpoints"
        )
    return folder


def _of_run(run: RunDirectory) -> CheckpointFolder:
    """Where a run has its checkpoints by its config; under its name of then if it was renamed."""
    config = load_config(run.config_path, [])
    folder = CheckpointFolder.of(config, run.path.absolute())
    if config.checkpoint.dir is None or config.run.name is None or folder.steps():
        return folder
    return CheckpointFolder.of(config, run.path.absolute().with_name(config.run.name))


def check_newest(checkpoint: Checkpoint, config: Config, run: RunDirectory) -> None:
    """Raises UserError where `run` has gone on after `checkpoint`: that would be lost."""
    folders = [CheckpointFolder.of(config, run.path.absolute())]
    if run.config_path.exists():
        folders.append(_of_run(run))
    for folder in folders:
        newest = max(folder.steps(), default=0)
        if newest > checkpoint.state.step:
            others = "run.dir" if config.checkpoint.dir is None else "run.dir and checkpoint.dir"
            raise UserError(
                f"{checkpoint.location}: {run.path} has gone on to step {newest} in {folder.root}: "
                f"go on with that by --resume {run.path}, or give another {others}"
            )


def check_unchanged(saved: dict[str, Any], config: Config) -> None:
    """Raises UserError, naming key, old and new value, for what a resumed run must not change."""
    # What the run did not know it had at today's default.
    was = load_config(saved, []).to_dict()
    changed = [
        f"{key} was {json.dumps(old)} and is {json.dumps(value)}"
        for key, old, value in _differences(was, config.to_dict())
        if not any(key == free or key.startswith(f"{free}.") for free in MAY_CHANGE)
    ]
    if changed:
        raise UserError(
            f"resume: {'; '.join(changed)}: this must stay as it was; to train with it, start a "
            "new run"
        )


def _differences(old: Any, new: Any, above: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, old, new) of all leaves that differ; what was not there before is None."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        if old != new:
            yield above, old, new
        return
    for key in old | new:
        yield from _differences(old.get(key), new.get(key), f"{above}.{key}" if above else key)


def cut_logs(run: RunDirectory, step: int, only: tuple[str, ...] | None = None) -> tuple[int, int]:
    """Takes out of a run's logs what came after `step`, as if the run had stopped there.

    So `step` events stay contiguous and none is there twice. `only`: kinds of events; those of
    others stay. Returns how many steps were taken out, and the last generation that is left (0:
    none).
    """
    lost = generation = 0
    for path in (run.events_path, run.plans_path):
        if not path.exists():
            continue
        kept = path.with_name(f"{path.name}.cut")
        kept.unlink(missing_ok=True)
        with JsonLinesWriter(kept) as writer:
            for record in read_json_lines(path):
                after = record.get("step", record.get("at_step", 0)) > step
                if after and (only is None or record.get("kind", "step") in only):
                    lost += record.get("kind") == "step"
                    continue
                if record.get("kind") == "generation":
                    generation = record["generation"]
                writer.append(record)
        kept.replace(path)
    return lost, generation


def learned(cost: CostModel) -> dict[str, Any]:
    """What a checkpoint keeps of the cost model."""
    return {name: getattr(cost, name) for name in LEARNED}


def with_learned(cost: CostModel, kept: dict[str, Any]) -> CostModel:
    """`cost` with the times that were learned before."""
    times = dict(kept)
    times["bandwidth"] = tuple((int(degree), speed) for degree, speed in kept["bandwidth"])
    return dataclasses.replace(cost, **times)
