"""`flexray export`: a run's model as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flexray.errors import UserError

if TYPE_CHECKING:
    import torch

DTYPES = ("bfloat16", "float16", "float32", "float64")


def export(
    run: Annotated[
        str,
        typer.Argument(
            help="A run's folder, its name in runs/, or a folder or URL of checkpoints."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write; it must not be there yet.")],
    dtype: Annotated[
        str | None,
        typer.Option(
            help=f"Of the parameters: {', '.join(DTYPES)}. Default: that of the master weights."
        ),
    ] = None,
    merge: Annotated[
        bool,
        typer.Option(
            "--merge", help="Of a run with model.lora: the whole model, not the adapters alone."
        ),
    ] = False,
) -> None:
    """Write a run's model as a Hugging Face folder.

    Takes the newest checkpoint of a run, also of one that is still training, and writes
    config.json, safetensors files and, where they are known, the tokenizer's files.
    AutoModelForCausalLM.from_pretrained(FOLDER) loads it. Parameters are read and written one at a
    time: a model that does not fit this machine's memory can be exported on it. Adapters (LoRA)
    become a PEFT folder that names the base model's, or are merged into its weights.

    Examples:

      flexray export runs/first --out my-model

      flexray export first --out my-model --dtype bfloat16

      flexray export adapted --merge --out my-model

      flexray export s3://bucket/checkpoints/first --out my-model
    """
    wanted = _dtype(dtype)
    from rich.console import Console

    from flexray.export import export as write
    from flexray.resume import locate

    console = Console(highlight=False)
    checkpoint = locate(run, Path("runs"))
    with console.status("reading") as status:
        exported = write(
            checkpoint,
            out,
            dtype=wanted,
            merge=merge,
            progress=lambda name: status.update(name),
        )
    console.print(
        f"{out}: the model after step {checkpoint.state.step}, {exported.values:,} parameters; "
        + (f"tokenizer from {exported.tokenizer}" if exported.tokenizer else "no tokenizer files"),
        soft_wrap=True,
    )


def _dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    if name not in DTYPES:
        raise UserError(f"--dtype {name}: choose one of {', '.join(DTYPES)}")
    import torch

    found: torch.dtype = getattr(torch, name)
    return found
