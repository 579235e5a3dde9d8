"""A checkpoint as a Hugging Face folder: read and written one parameter at a time.

No Ray, no GPU, and never more than one output file's parameters in memory.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from flexray.actors.checkpoint import CheckpointFailed, SavedTensors
from flexray.checkpoints import Checkpoint
from flexray.config import Config, load_config
from flexray.errors import UserError
from flexray.safetensors_files import SafetensorsFiles
from flexray.tokenizer_files import copy_tokenizer


@dataclass(frozen=True)
class Exported:
    """What was written."""

    values: int  # of all parameters
    tokenizer: str | None  # where its files were copied from


def export(
    checkpoint: Checkpoint,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    progress: Callable[[str], None] = lambda name: None,
) -> Exported:
    """Writes the model of `checkpoint` to a new folder `out`.

    Args:
        checkpoint: A whole one.
        out: Must not be there, or be empty. It appears when all of it is written.
        dtype: Of the parameters; None: that of the master weights.
        progress: Called with the name of every parameter that is read.

    Raises:
        UserError: `out` holds something, or the checkpoint cannot be read.
    """
    out = out.expanduser().absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: is there already: choose another folder")
    config = load_config(checkpoint.state.config, [])
    unfinished = out.with_name(f"{out.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
        exported = _write(checkpoint, config, unfinished, dtype or _master_dtype(config), progress)
        unfinished.replace(out)
    except CheckpointFailed as error:
        raise UserError(str(error)) from None
    except OSError as error:
        raise UserError(f"{error.filename}: cannot write: {error.strerror}") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return exported


def _write(
    checkpoint: Checkpoint,
    config: Config,
    folder: Path,
    dtype: torch.dtype,
    progress: Callable[[str], None],
) -> Exported:
    files = SafetensorsFiles(folder, dtype)
    for name, value in _parameters(SavedTensors(checkpoint.location)):
        progress(name)
        files.add(name, value)
    files.close()
    keys = dict(checkpoint.state.model)
    keys["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[keys["model_type"]]]
    keys["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(keys, indent=2) + "\n")
    return Exported(files.values, copy_tokenizer(config, folder))


def _parameters(saved: SavedTensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters (tied ones once) and buffers that belong to them, by their Hugging Face names."""
    for key in saved:
        if key.startswith("model."):
            yield key.removeprefix("model."), saved.read(key)


def _master_dtype(config: Config) -> torch.dtype:
    return torch.float64 if config.train.dtype == "float64" else torch.float32
