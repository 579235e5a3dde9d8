"""Adapters as a folder that PEFT loads (Hu et al., ICLR 2022, arXiv 2106.09685)."""

from __future__ import annotations

import torch

from flexray.actors.checkpoint import SavedTensors
from flexray.config import Config
from flexray.errors import UserError
from flexray.safetensors_files import SafetensorsFiles


def adapters(saved: SavedTensors) -> dict[str, torch.Tensor]:
    """All adapters of a checkpoint, by their names in the trained model."""
    return {
        key.removeprefix("model."): saved.read(key)
        for key in saved
        if key.startswith("model.") and ".lora_" in key
    }


def write_adapters(saved: SavedTensors, config: Config, files: SafetensorsFiles) -> None:
    """Writes adapter_model.safetensors and adapter_config.json, which names the base's folder.

    Raises UserError for adapters of random weights: no folder holds those.
    """
    lora = config.model.lora
    assert lora is not None
    if config.model.path is None:
        raise UserError(
            "adapters of a model with random weights (model.config): there is no folder of the "
            "base to name; write the whole model with --merge"
        )
    from peft import LoraConfig  # it takes seconds to import

    layers = set()
    for name, value in adapters(saved).items():
        layer, _, part = name.partition(".lora_")
        layers.add(layer)
        matrix = part.removesuffix(".default.weight")
        files.add(f"base_model.model.{layer}.lora_{matrix}.weight", value)
    files.close("adapter_model")
    LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=sorted(layers),
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(config.model.path.absolute()),
        inference_mode=True,
    ).save_pretrained(str(files.folder))
