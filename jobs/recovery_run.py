"""Runs of FlexRay's that a benchmark watches from the driver's process, and ends."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from rich.console import Console

from flexray import Callback, Trainer
from flexray.display import Display
from flexray.jobs.recovery_model import FEWEST, LEARNING_RATE, LENGTH, MODEL, RANKS, SEQUENCES


class Stopping(Callback):
    """A callback that can scale and end its own run."""

    trainer: Trainer

    def stop(self) -> None:
        """Ends the run after the steps under way."""
        self.trainer.stop()


def train(folder: Path, name: str, callback: Stopping, sections: dict[str, Any]) -> Path:
    """Trains until `callback` stops it, and returns the run's folder.

    What it shows goes to a file beside that folder.
    """
    config: dict[str, Any] = {
        "run": {"dir": folder, "name": name},
        "checkpoint": {"every": None},
        "tracking": {"wandb": "disabled"},
    } | sections
    config["train"] = config["train"] | {"steps": 1_000_000}
    with (
        (folder / f"{name}.log").open("w") as log,
        Display(Console(file=log, width=200)) as display,
    ):
        callback.trainer = Trainer(config, callbacks=[callback], display=display)
        run = callback.trainer.train().path
    shutil.rmtree(run / "checkpoints")  # large, and nobody goes on from it
    return run


def big_model() -> dict[str, Any]:
    """Sections of a config that trains the model of recovery_model.py on four CPU ranks."""
    return {
        "cluster": {"gpus": RANKS, "min_gpus": FEWEST, "device": "cpu"},
        "model": {"config": MODEL},
        "data": {"max_length": LENGTH, "over_length": "truncate"},
        "train": {"batch_sequences": SEQUENCES, "learning_rate": LEARNING_RATE},
    }
