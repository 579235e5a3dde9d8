"""A checkpoint as a Hugging Face folder: read and written one parameter at a time.

No Ray, no GPU, and never more than one output file's parameters in memory (and the adapters, where
adapters were trained: they become a PEFT folder, or are merged into the weights).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from safetensors import SafetensorError
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from flexray.actors.checkpoint import CheckpointFailed, SavedTensors
from flexray.actors.lora import Lora
from flexray.actors.lora import merge as merge_adapters
from flexray.actors.model import ModelRefused, build_on_meta
from flexray.actors.sharding import initial_parameters
from flexray.adapter_files import adapters, write_adapters
from flexray.checkpoints import Checkpoint
from flexray.config import Config, load_config
from flexray.errors import UserError
from flexray.safetensors_files import SafetensorsFiles
from flexray.tokenizer_files import copy_tokenizer

Named = Iterator[tuple[str, torch.Tensor]]


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
    merge: bool = False,
    progress: Callable[[str], None] = lambda name: None,
) -> Exported:
    """Writes the model of `checkpoint` to a new folder `out`.

    Args:
        checkpoint: A whole one.
        out: Must not be there, or be empty. It appears when all of it is written.
        dtype: Of the parameters; None: that of the master weights.
        merge: Write the whole model with adapters added to its weights, not a PEFT folder.
        progress: Called with the name of every parameter that is read.

    Raises:
        UserError: `out` holds something, or the checkpoint cannot be read.
    """
    out = out.expanduser().absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: is there already: choose another folder")
    config = load_config(checkpoint.state.config, [])
    if merge and config.model.lora is None:
        raise UserError("--merge: this run trained no adapters (model.lora)")
    model_type = checkpoint.state.model["model_type"]
    if merge and model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UserError(
            f"--merge: transformers has no causal language model of type {model_type} to merge the "
            "adapters into: leave --merge out"
        )
    unfinished = out.with_name(f"{out.name}.{uuid4().hex}.unfinished")  # of this export alone
    try:
        unfinished.mkdir(parents=True)
        files = SafetensorsFiles(unfinished, dtype or _master_dtype(config))
        saved = SavedTensors(checkpoint.location)
        if config.model.lora and not merge:
            write_adapters(saved, config, files)
        else:
            for name, value in _parameters(saved, checkpoint, config):
                progress(name)
                files.add(name, value)
            files.close("model")
            _write_config(checkpoint.state.model, files)
        exported = Exported(files.values, copy_tokenizer(config, unfinished))
        unfinished.replace(out)
    except (CheckpointFailed, ModelRefused) as error:
        raise UserError(str(error)) from None
    except SafetensorError as error:  # of writing: what reads raises ModelRefused
        raise UserError(f"{out}: cannot write: {' '.join(str(error).split())}") from None
    except OSError as error:  # it names no file when the disk is full
        path = str(error.filename or out).replace(str(unfinished), str(out))
        raise UserError(f"{path}: cannot write: {error.strerror}") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return exported


def _parameters(saved: SavedTensors, checkpoint: Checkpoint, config: Config) -> Named:
    """Parameters (tied ones once) and buffers that belong to them, by their Hugging Face names."""
    lora = config.model.lora
    if lora is None:
        for key in saved:
            if key.startswith("model."):
                yield key.removeprefix("model."), saved.read(key)
        return
    blueprint = build_on_meta(AutoConfig.for_model(**checkpoint.state.model), torch.float32)
    base = initial_parameters(blueprint, config.model.path, config.train.seed)
    frozen = getattr(torch, config.train.dtype)
    yield from merge_adapters(base, adapters(saved), Lora(**lora.model_dump()), frozen=frozen)


def _write_config(model: dict[str, Any], files: SafetensorsFiles) -> None:
    keys = model | {"dtype": str(files.dtype).removeprefix("torch.")}
    # A type of the user's own has none: his class loads the folder.
    if architecture := MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model["model_type"]):
        keys["architectures"] = [architecture]
    (files.folder / "config.json").write_text(json.dumps(keys, indent=2) + "\n")


def _master_dtype(config: Config) -> torch.dtype:
    """Of the master weights."""
    return torch.float64 if config.train.dtype == "float64" else torch.float32
