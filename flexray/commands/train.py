"""`flexray train`: the main job."""

from __future__ import annotations

import shlex
import signal
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from flexray.config import load_config

if TYPE_CHECKING:
    from flexray.display import Display
    from flexray.trainer import Trainer


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
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="RUN",
            help="Goes on with a run from its newest checkpoint: its folder, its name in runs/, or "
            "a folder or URL of checkpoints.",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Everything but training: checks, memory estimate, first plan."
        ),
    ] = False,
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="STEPS",
            help="Writes a trace of these steps (5:8, or 5) per rank into the run's folder.",
        ),
    ] = None,
) -> None:
    """Train a language model, with a new plan for every step.

    With nothing given it starts a local Ray, makes 4 CPU ranks (or one rank a GPU), trains a
    small Llama with random weights on a built-in corpus for 30 steps and shows the loss, the plan
    of every step (4 | 2 1 1: one group of four ranks, then one of two beside two single ranks),
    planned against measured time, and what the plan gains over the best single group size.

    Everything about a run is kept in runs/NAME: the resolved config, every plan, events.jsonl
    (one line a step), checkpoints and the Weights & Biases run (offline unless you are logged in).

    Examples:

      flexray train

      flexray train --set train.steps=100 --set train.learning_rate=3e-4

      flexray train config.yaml --set run.name=first --set cluster.gpus=2

      flexray train config.yaml --dry-run

      flexray train --resume first --set train.steps=200

    All keys are in docs/config.md, checkpoints and what may change on a resume in
    docs/checkpoints.md. What this machine has: flexray doctor. The model as a Hugging Face folder:
    flexray export. Ctrl-C stops after the step with a checkpoint, a second one at once.
    """
    if not resume:
        load_config(config, overrides or [])  # its errors need no torch
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)  # SIGINT too: shells have background jobs ignore it

    from flexray.display import Display

    with Display() as display:
        display.message("Starting (loading torch, checking the model, opening the corpus)")
        from flexray.trainer import Trainer

        trainer = Trainer(
            config, resume=resume, overrides=overrides or [], profile=profile, display=display
        )
        if dry_run:
            from flexray.dry_run import dry_run as show

            state = trainer.resume.state if trainer.resume else None
            show(trainer.config, state, display.message)
        else:
            _train(trainer, display)


def _train(trainer: Trainer, display: Display) -> None:
    """Trains, and says how it ended and how to go on."""
    from flexray.errors import RunFailed

    try:
        result = trainer.train()
    except RunFailed as error:
        display.message(
            f"Failed after {trainer.steps_done} steps: {error}. Run: {trainer.path}"
            + _going_on(trainer)
        )
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        if trainer.path is None:
            raise
        display.message(
            f"Stopped after {trainer.steps_done} of {trainer.config.train.steps} steps; every "
            f"process of the run has ended. Plans and losses are in {trainer.path}."
            + _going_on(trainer)
        )
        raise typer.Exit(130) from None
    if result.stopped:
        display.message(
            f"Stopped after {result.steps} of {trainer.config.train.steps} steps; every process of "
            f"the run has ended. Run: {result.path}." + _going_on(trainer)
        )
        raise typer.Exit(130)
    display.message(
        f"Done: {result.steps} steps, loss {result.loss:.4f}. Run: {result.path}. The model as a "
        f"Hugging Face folder: flexray export {shlex.quote(str(result.path))} --out FOLDER"
    )


def _going_on(trainer: Trainer) -> str:
    """How to go on with a run that ended early."""
    run = shlex.quote(str(trainer.path))
    if steps := trainer.checkpoints():
        return f" To go on from step {steps[-1]}: flexray train --resume {run}"
    if trainer.resume:
        return f" To go on from step {trainer.resume.state.step}: the same command again"
    return (
        " There is no checkpoint yet. To train again from the start: "
        f"flexray train {run}/config.yaml --set run.name=NEW_NAME"
    )


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Both signals end a run as Ctrl-C does; a second one does not break off the clean-up."""
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, signal.SIG_IGN)
    raise KeyboardInterrupt
