"""Low-rank adapters by PEFT (Hu et al., ICLR 2022, arXiv 2106.09685): nothing else is trained.

Adapters are sharded as every other parameter is. What is frozen has no gradient and no optimizer
state, and so is kept in the compute dtype: float32 masters are for updates that it never gets.
"""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from flexray.actors.model import ModelRefused, body_and_head, did_you_mean
from flexray.actors.streams import stream


@dataclass(frozen=True)
class Lora:
    """y = W x + (alpha / rank) B A x, with A [rank, in] and B [out, rank]; no dropout."""

    rank: int
    alpha: float
    targets: tuple[str, ...] | None = None  # linear layers by name; None: all of the decoder layers


def add_adapters(model: PreTrainedModel, lora: Lora, *, master: torch.dtype) -> None:
    """Adds adapters in `master` dtype to a model on the meta device, and freezes all the rest.

    Raises ModelRefused for targets that are no linear layers of the decoder, and without PEFT.
    """
    if importlib.util.find_spec("peft") is None:
        raise ModelRefused("model.lora needs PEFT: pip install peft")
    from peft import LoraConfig, inject_adapter_in_model  # it takes seconds to import

    targets = _targets(model, lora.targets)
    settings = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets)
    try:
        with warnings.catch_warnings(action="ignore"):
            inject_adapter_in_model(settings, model, low_cpu_mem_usage=True)
        adapted = [name for name, module in model.named_modules() if hasattr(module, "lora_A")]
    except ValueError:
        adapted = []
    if sorted(adapted) != sorted(targets):
        # It takes a dense layer's name for a fused expert's parameter, in files that it writes too.
        raise ModelRefused(
            f"model.lora: PEFT gives these layers of {model.config.model_type} another meaning: "
            "name others in model.lora.targets, such as [q_proj, k_proj, v_proj, o_proj]"
        )
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(master)
    # Else nothing flows back to the first layer's input, which is where its own work is timed.
    model.enable_input_require_grads()


def _targets(model: PreTrainedModel, wanted: tuple[str, ...] | None) -> list[str]:
    """Full names of the linear layers to adapt."""
    layers = body_and_head(model)[0].layers
    prefix = next(name for name, module in model.named_modules() if module is layers)
    linear = [f"{prefix}.{n}" for n, m in layers.named_modules() if isinstance(m, nn.Linear)]
    for name in wanted or ():
        if not any(f".{layer}".endswith(f".{name}") for layer in linear):
            known = {layer.rpartition(".")[2] for layer in linear}
            raise ModelRefused(
                f"model.lora.targets: {name} is no linear layer of this model's decoder layers "
                f"({', '.join(sorted(known)) or 'they have none'})" + did_you_mean(name, known)
            )
    return [
        layer
        for layer in linear
        if wanted is None or any(f".{layer}".endswith(f".{name}") for name in wanted)
    ]


def random_adapters(model: nn.Module, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """A from a uniform distribution and B zero, as PEFT does, each A from a stream of its own.

    A parameter is the same whatever the world size. Trained parameters of `model` only.
    """
    for name, parameter in model.named_parameters():
        if ".lora_A." in name:
            value = torch.empty(parameter.shape)
            generator = torch.Generator().manual_seed(stream(seed, name))
            yield name, nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=generator)
        elif ".lora_B." in name:
            yield name, torch.zeros(parameter.shape)


def merge(
    base: Iterable[tuple[str, torch.Tensor]],
    adapters: Mapping[str, torch.Tensor],
    lora: Lora,
    *,
    frozen: torch.dtype,
) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters of the plain model that computes what `base` with `adapters` does.

    `base` is what the frozen parameters were filled with (in dtype `frozen`), one at a time, by
    plain names; `adapters` by their names in the trained model. What is adapted gets their dtype.
    """
    left = set(adapters)
    for name, value in base:
        layer = name.removesuffix(".weight")
        names = [f"{layer}.lora_{part}.default.weight" for part in "AB"]
        value = value.to(frozen)
        if left.issuperset(names):
            a, b = (adapters[n] for n in names)
            value = value.to(a.dtype) + lora.alpha / lora.rank * (b @ a)
            left.difference_update(names)
        yield name, value
    if left:
        raise ModelRefused(f"adapters: the model has no layer for {min(left)}")


def plain_name(name: str) -> str:
    """The name that a parameter has in the model without adapters; an adapter's stays."""
    return name.replace(".base_layer.", ".")
