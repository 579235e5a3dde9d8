"""The `flexray` program: one Typer app, a module in flexray/commands/ a command.

A command's module is imported when the command runs, so that `flexray --help` is there at once and
`flexray plan` works where torch does not.
"""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from flexray import __version__

# Name -> what `flexray --help` says of it: the first line of the function's docstring.
COMMANDS = {
    "train": "Train a language model, with a new plan for every step.",
    "scale": "Give a run that is training more GPUs, or fewer.",
    "profile": "Measure the cost model on the cluster that a config describes.",
    "plan": "Plan one training step: which groups of GPUs form and which rows each gets.",
    "simulate": "Simulate what planning every step would gain on a cluster, before renting it.",
    "annotate": "Make a corpus: tokenise documents and record the length of each.",
    "inspect": "Show what is in a corpus: how long its sequences are, and how it was made.",
    "export": "Write a run's model as a Hugging Face folder.",
    "doctor": "Show what this machine has and what a run on it would use.",
}

_SETTINGS: dict[str, Any] = {
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "rich_markup_mode": "markdown",
    "context_settings": {"help_option_names": ["-h", "--help"]},
}


class _Command(TyperCommand):
    """Stands for a command until it is run (or asked for its own help)."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        name = str(self.name)
        one = typer.Typer(**_SETTINGS)
        one.command(name)(getattr(import_module(f"flexray.commands.{name}"), name))
        return typer.main.get_command(one).make_context(info_name, args, parent, **extra)


class _Program(TyperGroup):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, summary in COMMANDS.items():
            self.add_command(_Command(name=name, help=summary))


app = typer.Typer(
    cls=_Program,
    name="flexray",
    help="Train language models on sequences of widely varying length, with a new "
    "sequence-parallel plan for every step.",
    no_args_is_help=True,
    **_SETTINGS,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"flexray {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    pass
