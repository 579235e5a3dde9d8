"""`flexray profile`: the cost model of a cluster, measured."""

from __future__ import annotations

import shlex
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console

from flexray.config import Config, load_config
from flexray.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from flexray.measurement.measure import Measurements
    from flexray.model_preparation import ModelJob


def profile(
    out: Annotated[
        Path,
        typer.Option(
            metavar="PRESET.yaml",
            show_default=False,
            help="The preset to write; a picture of the fit goes beside it.",
        ),
    ],
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CONFIG.yaml]",
            help="What is to be trained, as for `flexray train`; its data are not read.",
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
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the preset that is there already.")
    ] = False,
) -> None:
    """Measure the cost model on the cluster that a config describes.

    Starts the ranks as `flexray train` would, runs training steps on random
    rows chosen to tell every coefficient apart, fits the cost model and
    writes it as a preset. A bad fit is refused with the reason, exit code 1,
    and nothing is written.

    Examples:

      flexray profile config.yaml --out my-cluster.yaml

      flexray train config.yaml --set planner.preset=my-cluster.yaml

      flexray plan my-corpus --preset my-cluster.yaml

    For a trace of training steps (torch profiler) see flexray train
    --profile. docs/profile.md says what is measured and how.
    """
    read = load_config(config, overrides or [])
    picture = _check_out(out, overwrite)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    console = Console(highlight=False, soft_wrap=True)
    with console.status("starting (loading torch, checking the model)") as status:
        job = _job(read)
        measured = _measured(job, status.update)
    _finish(job, measured, out, picture, console)


def _check_out(out: Path, overwrite: bool) -> Path:
    """Where the picture goes. Raises UserError before anything is measured."""
    if out.suffix not in {".yaml", ".yml"}:
        raise UserError(f"--out {out}: give a file that ends in .yaml")
    if not out.parent.is_dir():
        raise UserError(f"--out {out}: there is no folder {out.parent}")
    picture = out.with_suffix(".svg")
    for path in (out, picture):
        if path.is_dir():
            raise UserError(f"--out {out}: {path} is a folder")
        if path.exists() and not overwrite:
            raise UserError(f"--out {out}: {path} is there already: pass another, or --overwrite")
    return picture


def _job(config: Config) -> ModelJob:
    from flexray.model_preparation import prepare_model

    # What a preset says is to be measured; it may be the very one that is to be written.
    planner = config.planner.model_copy(update={"preset": "auto"})
    return prepare_model(config.model_copy(update={"planner": planner}))


def _measured(job: ModelJob, say: Callable[[str], None]) -> Measurements:
    from flexray.actors.crew import ImpossibleRequest, PoolError
    from flexray.measurement.measure import measure

    try:
        return measure(job, say)
    except ImpossibleRequest as error:
        raise UserError(str(error)) from None
    except PoolError as error:
        _fail(str(error))


def _finish(
    job: ModelJob, measured: Measurements, out: Path, picture: Path, console: Console
) -> None:
    from flexray.measurement.fit import BadFit, fit
    from flexray.measurement.memory import fit_memory
    from flexray.measurement.plot import draw_fit
    from flexray.measurement.preset import MemoryTerms, preset_yaml
    from flexray.measurement.tables import show_fit, show_rest

    fitted = fit(measured.cost, measured.cluster, measured.observed)
    show_fit(measured, fitted, console)
    try:
        fitted.check()
    except BadFit as error:
        _fail(f"no preset was written: {error}")
    across = {}
    if measured.across:
        other = fit(fitted.cost, measured.cluster, measured.across).cost
        across = {d: other.bandwidth_at(d) for d in measured.degrees_across}
    memory = fit_memory(measured.peaks, job.config.model.loss_chunk)
    terms = MemoryTerms.of(measured.cost, memory, measured.device, measured.cluster.gpus)
    show_rest(measured, across, memory, terms, console)
    try:
        out.write_text(preset_yaml(job, measured, fitted, terms))
        draw_fit(fitted, f"{job.parameters:,} parameters, {measured.where}", picture)
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written: {error.strerror}") from None
    console.print(
        f"Written: {out} and {picture}. To train with it: flexray train ... "
        f"--set planner.preset={shlex.quote(str(out))}"
    )


def _fail(line: str) -> NoReturn:
    typer.echo(f"error: {line}", err=True)
    raise typer.Exit(1)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Both signals end it as Ctrl-C does; a second one does not break off the clean-up."""
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, signal.SIG_IGN)
    raise KeyboardInterrupt
