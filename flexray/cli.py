"""The `flexray` program: one Typer app, a module a command."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Annotated

import typer

from flexray import __version__

app = typer.Typer(
    name="flexray",
    help="Train language models on sequences of widely varying length, with a new "
    "sequence-parallel plan for every step.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"flexray {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="and exit")
    ] = False,
) -> None:
    pass


for _command in ("train", "plan", "annotate", "doctor"):
    if find_spec(f"flexray.commands.{_command}"):
        app.command(_command)(getattr(import_module(f"flexray.commands.{_command}"), _command))
