"""`flexray train`: the main job."""

from __future__ import annotations

import shlex
import shutil
import signal
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from flexray.config import load_config
from flexray.errors import UserError


def train(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CONFIG.yaml]",
            help="What to train, in YAML. Without it: a small Llama on Python's own source files.",
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="SECTION.KEY=VALUE",
            help="Changes one key of the config; may be given many times.",
        ),
    ] = None,
) -> None:
    """Train a language model, with a new plan for every step.

    With nothing given it starts a local Ray, makes 4 CPU ranks (or one rank a GPU), trains a
    small Llama with random weights on a built-in corpus for 30 steps and shows the loss, the plan
    of every step (4 | 2 1 1: one group of four ranks, then one of two beside two single ranks),
    planned against measured time, and what the plan gains over the best single group size.

    Everything about a run is kept in runs/NAME: the resolved config, every plan, events.jsonl
    (one line a step) and the Weights & Biases run (offline unless you are logged in).

    Examples:

      flexray train

      flexray train --set train.steps=100 --set train.learning_rate=3e-4

      flexray train config.yaml --set run.name=first --set cluster.gpus=2

    All keys are in docs/config.md. What this machine has: flexray doctor. Ctrl-C stops cleanly.
    """
    settings = load_config(config, overrides or [])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)  # SIGINT too: shells have background jobs ignore it

    from flexray.display import Display

    with Display() as display:
        display.message("Starting (loading torch, checking the model, opening the corpus)")
        from flexray.datasets.errors import CorpusError
        from flexray.driver import Driver, RunFailed
        from flexray.preparation import prepare
        from flexray.run_directory import RunDirectory
        from flexray.solver.plan import PlanningError

        job = prepare(settings)
        run = RunDirectory.create(settings.run.dir, settings.run.name)
        driver = Driver(job, run, display)
        try:
            driver.train()
        except (UserError, CorpusError, PlanningError):
            if not driver.steps_done:  # the user's to put right: the name stays free
                shutil.rmtree(run.path, ignore_errors=True)
            raise
        except RunFailed as error:
            display.message(f"Failed after {driver.steps_done} steps: {error}. Run: {run.path}")
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            display.message(
                f"Stopped after {driver.steps_done} of {settings.train.steps} steps; every process "
                f"of the run has ended. Plans and losses are in {run.path}. To train again from "
                f"the start: flexray train {shlex.quote(str(run.config_path))} "
                "--set run.name=NEW_NAME"
            )
            raise typer.Exit(130) from None
        display.message(f"Done: {driver.steps_done} steps, loss {driver.loss:.4f}. Run: {run.path}")


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Both signals end a run as Ctrl-C does; a second one does not break off the clean-up."""
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, signal.SIG_IGN)
    raise KeyboardInterrupt
