"""`flexray scale`: another number of GPUs for a run that is training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flexray.config import load_config
from flexray.errors import UserError
from flexray.resume import run_folder
from flexray.run_directory import RunDirectory
from flexray.scaling import ask, check_scale


def scale(
    run: Annotated[str, typer.Argument(help="The run's folder, or its name in runs/.")],
    gpus: Annotated[int, typer.Argument(help="How many it shall have (ranks, on CPUs).")],
) -> None:
    """Give a run that is training more GPUs, or fewer.

    Takes effect between two steps: new actors join the others, or some leave, which keep their
    part of the training state until the others have it. Nothing is lost and no process starts
    again. Where the cluster has not enough GPUs the run goes on and takes them in as they come
    (Ray's autoscaler is asked for them). The limits are cluster.min_gpus and cluster.max_gpus of
    the run's config. Every membership is a `generation` event in the run's events.jsonl.

    Examples:

      flexray scale first 8

      flexray scale runs/first 2
    """
    folder = _folder(run)
    check_scale(load_config(folder.config_path, []).cluster, gpus)
    if not folder.is_held:
        raise UserError(
            f"{folder.path}: this run is not training now: flexray train --resume {folder.path} "
            f"--set cluster.gpus={gpus}"
        )
    ask(folder, gpus)
    typer.echo(f"{folder.path}: asked for {gpus} ranks; they change between two steps")


def _folder(run: str) -> RunDirectory:
    path = run_folder(run, Path("runs"))
    if path is None:
        raise UserError(f"{run}: neither a run's folder nor a run in runs/")
    return RunDirectory(path)
