"""Hugging Face causal language models: which are admitted, and how one is built.

Admitted is what trains the same under every plan: plain, full, causal attention and a head whose
output is the logits. The rest is refused by name, before any GPU is asked for: by the
configuration's own words, and by a forward pass on the meta device that shows what the code does.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from flexray.actors.attention.ulysses import IMPLEMENTATION, AttentionRefused, SequenceParallel
from flexray.actors.gang import Gang
from flexray.actors.pack import Borders
from flexray.actors.timing import Stopwatch

BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")
NEUTRAL = (None, False, 0)


class ModelRefused(ValueError):
    """A model or setting that FlexRay cannot train exactly."""


def model_config(
    config: Mapping[str, Any] | None = None, path: Path | None = None
) -> PretrainedConfig:
    """The Hugging Face configuration from its keys (with `model_type`) or from a local folder.

    Raises ModelRefused, naming what is wrong, also for what `check_config` refuses.
    """
    try:
        if path is not None:
            hf_config = AutoConfig.from_pretrained(path, local_files_only=True)
        else:
            keys = dict(config or {})
            hf_config = AutoConfig.for_model(keys.pop("model_type"), **keys)
    except KeyError as error:
        raise ModelRefused(
            f"model.config needs model_type, the name of a Hugging Face architecture: {error}"
        ) from None
    except (ValueError, OSError, TypeError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise ModelRefused(f"model: {first_line}") from None
    check_config(hf_config)
    return hf_config


def check_config(config: PretrainedConfig) -> None:
    """Raises ModelRefused for settings that depend on the plan or would be ignored."""
    for name, value, why in _refused_settings(config):
        raise ModelRefused(f"model {config.model_type}: {name}={value!r} is not supported: {why}")


def _refused_settings(config: PretrainedConfig) -> list[tuple[str, Any, str]]:
    """(setting, value, why) of everything in `config` that is refused."""
    keys = config.to_dict()
    refused = [
        (name, value, "dropout draws other numbers under every plan; set it to 0")
        for name, value in keys.items()
        if ("dropout" in name or name.endswith("pdrop")) and value not in NEUTRAL
    ]
    window = keys.get("sliding_window")
    if window and keys.get("use_sliding_window", True):
        refused.append(("sliding_window", window, "attention is full; set it to null"))
    refused += [
        ("layer_types", kind, "only full_attention layers are")
        for kind in sorted(set(keys.get("layer_types") or ()) - {"full_attention"})
    ]
    refused += [
        (name, keys[name], "it would be ignored")
        for name in (
            "attention_chunk_size",
            "attn_logit_softcapping",
            "final_logit_softcapping",
            "use_bidirectional_attention",
            "alibi",
        )
        if keys.get(name)
    ]
    if keys.get("output_router_logits"):
        refused.append(
            (
                "output_router_logits",
                True,
                "the auxiliary loss of a mixture of experts is not summed",
            )
        )
    if keys.get("is_encoder_decoder"):
        refused.append(("is_encoder_decoder", True, "only causal language models are"))
    refused += [
        ("rope_type", kind, "its positions look at the whole batch")
        for kind in _rope_types(keys)
        if kind in BATCH_DEPENDENT_ROPE
    ]
    return refused


def _rope_types(keys: Any) -> list[str]:
    """Every RoPE type named anywhere in the RoPE settings, old and new spelling."""
    found = []
    for name in ("rope_parameters", "rope_scaling"):
        stack = [keys.get(name)]
        while stack:
            settings = stack.pop()
            if isinstance(settings, Mapping):
                found += [settings[k] for k in ("rope_type", "type") if settings.get(k)]
                stack += settings.values()
    return found


def build_on_meta(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model without memory for its parameters, its attention replaced by FlexRay's."""
    with torch.device("meta"):
        try:
            model = AutoModelForCausalLM.from_config(
                copy.deepcopy(config),  # which from_config changes
                dtype=dtype,
                attn_implementation=IMPLEMENTATION,
            )
        except (ValueError, KeyError) as error:
            raise ModelRefused(f"model {config.model_type}: {str(error).splitlines()[0]}") from None
    model.config.use_cache = False
    return model


def check_model(config: PretrainedConfig) -> PreTrainedModel:
    """Runs the model on the meta device and raises ModelRefused for what its code would ignore.

    Every layer must attend through FlexRay's attention, and the logits must be the head's output
    and nothing else (no scaling, no soft cap), since the loss is computed from the head in chunks.
    Returns the model, on the meta device.
    """
    check_config(config)
    model = build_on_meta(config, torch.float32)
    kind = config.model_type
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            raise ModelRefused(f"model {kind}: {name} has dropout {module.p}: set it to 0")
    body, head = body_and_head(model)
    model.train()
    keywords = {
        "position_ids": torch.arange(4, device="meta")[None],
        "attention_mask": None,
        "use_cache": False,
        "sp": _CountingContext(),
    }
    ids = torch.zeros((1, 4), dtype=torch.long, device="meta")
    try:
        with _Recorder() as whole:
            model(input_ids=ids, **keywords)
        calls = keywords["sp"].calls
        with _Recorder() as parts:
            head(body(input_ids=ids, **keywords)[0])
    except AttentionRefused as error:
        raise ModelRefused(f"model {kind}: {error}") from None
    except TypeError as error:
        raise ModelRefused(
            f"model {kind}: its forward takes no packed sequences: {error}"
        ) from None
    if calls != config.num_hidden_layers:
        raise ModelRefused(
            f"model {kind}: {calls} of {config.num_hidden_layers} layers attend through the "
            "attention interface; the others would ignore the borders between sequences"
        )
    if whole.operations != parts.operations:
        extra = whole.operations[len(parts.operations) :] or ["another head"]
        raise ModelRefused(
            f"model {kind}: it computes {extra[0]} after its head (scaled or capped logits), which "
            "the chunked loss would ignore"
        )
    return model


def body_and_head(model: PreTrainedModel) -> tuple[nn.Module, nn.Module]:
    """The decoder stack (ids to hidden states) and the output head (hidden states to logits)."""
    body, head = model.base_model, model.get_output_embeddings()
    if body is model or head is None or not hasattr(body, "layers"):
        raise ModelRefused(
            f"model {model.config.model_type}: no stack of layers with an output head was found"
        )
    return body, head


class _CountingContext(SequenceParallel):
    """A context whose kernel only counts how often it is called."""

    def __init__(self) -> None:
        super().__init__(Gang((0,), 0, None, Stopwatch()), Borders([4]), "sdpa")
        self.calls = 0

        def count(q: torch.Tensor, *_: Any) -> torch.Tensor:
            self.calls += 1
            return torch.empty_like(q)

        self.kernel = count


class _Recorder(TorchDispatchMode):
    """The names of the operations that ran, views apart."""

    VIEWS = (
        "aten.slice",
        "aten.view",
        "aten.alias",
        "aten.detach",
        "aten.unsqueeze",
        "aten._to_copy",
    )

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not str(func).startswith(self.VIEWS):
            self.operations.append(str(func))
        return func(*args, **(kwargs or {}))
