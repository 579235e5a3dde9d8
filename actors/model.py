"""Hugging Face causal language models: which are admitted, and how one is built.

Admitted is what trains the same under every plan: plain, full, causal attention and a head whose
output is the logits. The rest is refused by name, before any GPU is asked for: by the
configuration's own words, and by a forward pass on the meta device that shows what the code does.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from flexray.actors.attention.ulysses import IMPLEMENTATION, AttentionRefused
from flexray.actors.trial import RANDOM, Recorder, Trial

BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")
# Spellings that transformers still translates.
OLD_KEYS = {"model_type", "rope_scaling", "rope_theta", "torch_dtype", "transformers_version"}

ModelFactory = Callable[[PretrainedConfig], PreTrainedModel]


class ModelRefused(ValueError):
    """A model or setting that FlexRay cannot train exactly."""


def model_config(
    config: Mapping[str, Any] | None = None, path: Path | None = None
) -> PretrainedConfig:
    """The Hugging Face configuration from its keys (with `model_type`) or from a local folder.

    Raises ModelRefused, naming what is wrong, also for what `check_config` refuses.
    """
    if path is not None and not path.is_dir():
        raise ModelRefused(f"model.path={path}: no such folder")
    try:
        if path is not None:
            hf_config = AutoConfig.from_pretrained(path, local_files_only=True)
        else:
            keys = dict(config or {})
            _check_keys(keys)
            hf_config = AutoConfig.for_model(**keys)
    except ModelRefused:
        raise
    except Exception as error:  # whatever a configuration's own checks raise
        missing = "missing key " if isinstance(error, KeyError) else ""
        raise ModelRefused(f"model: {missing}{' '.join(str(error).split())}") from None
    check_config(hf_config)
    return hf_config


def _check_keys(keys: Mapping[str, Any]) -> None:
    """Raises ModelRefused for a misspelt key: transformers would keep it and ignore it."""
    kind = keys.get("model_type")
    if kind not in CONFIG_MAPPING:
        raise ModelRefused(
            f"model.config.model_type={kind!r} is no Hugging Face architecture"
            + did_you_mean(str(kind), CONFIG_MAPPING)
        )
    config_class = CONFIG_MAPPING[kind]
    known = {f.name for f in fields(config_class)} | set(config_class.attribute_map) | OLD_KEYS
    for key in keys:
        if key not in known:
            raise ModelRefused(
                f"model.config.{key} is no setting of {kind} models" + did_you_mean(key, known)
            )


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint at the nearest of what is known, or nothing."""
    near = difflib.get_close_matches(word, list(known), 1)
    return f": did you mean {near[0]}?" if near else ""


def check_config(config: PretrainedConfig) -> None:
    """Raises ModelRefused for settings that make results depend on the plan or would be ignored."""
    for name, value, why in _refused_settings(config):
        raise ModelRefused(f"model {config.model_type}: {name}={value!r} is not supported: {why}")


def _refused_settings(config: PretrainedConfig) -> list[tuple[str, Any, str]]:
    """(setting, value, why and what to do) of everything in `config` that is refused."""
    keys = config.to_dict()
    keys |= keys.get("text_config") or {}
    refused: list[tuple[str, Any, str]] = []
    if keys.get("is_encoder_decoder"):
        why = "only causal language models are; use another model"
        refused.append(("is_encoder_decoder", True, why))
    refused += [
        (name, value, "dropout draws other numbers under every plan; set it to 0")
        for name, value in keys.items()
        # Heads for other tasks bring settings of their own.
        if ("drop" in name and not name.startswith(("classifier_", "summary_"))) and value
    ]
    window = keys.get("sliding_window")
    if window and keys.get("use_sliding_window", True):
        refused.append(("sliding_window", window, "attention is full; set it to null"))
    refused += [
        ("layer_types", kind, "only full_attention layers are; use another model")
        for kind in sorted(set(keys.get("layer_types") or ()) - {"full_attention"})
    ]
    refused += [
        (name, keys[name], "it would be ignored; set it to null")
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
        why = "the auxiliary loss of a mixture of experts is not summed over ranks; set it to false"
        refused.append(("output_router_logits", True, why))
    if keys.get("is_causal", True) is False:
        refused.append(("is_causal", False, "attention is causal; set it to true"))
    refused += [
        ("rope_type", kind, "its positions look at the whole batch; use default, linear or yarn")
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


def build_on_meta(
    config: PretrainedConfig, dtype: torch.dtype, factory: ModelFactory | None = None
) -> PreTrainedModel:
    """The model without memory for its parameters, its attention replaced by FlexRay's.

    `factory` makes it from the configuration; without one its architecture's own class does.
    """
    config = copy.deepcopy(config)  # which the architecture's class changes
    with torch.device("meta"):
        try:
            if factory is None:
                model = AutoModelForCausalLM.from_config(
                    config, dtype=dtype, attn_implementation=IMPLEMENTATION
                )
            else:
                model = _made_by(factory, config, dtype)
        except ModelRefused:
            raise
        except Exception as error:  # whatever a model's own code raises
            if str(error) == repr(IMPLEMENTATION):
                raise ModelRefused(
                    f"model {config.model_type}: its attention is written in a way that cannot be "
                    "replaced; use another model"
                ) from None
            raise ModelRefused(
                f"model {config.model_type}: it cannot be built: {_first_line(error)}"
            ) from None
    model.config.use_cache = False
    return model


def _made_by(
    factory: ModelFactory, config: PretrainedConfig, dtype: torch.dtype
) -> PreTrainedModel:
    config._attn_implementation = IMPLEMENTATION
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = factory(config)
    finally:
        torch.set_default_dtype(default)
    if not isinstance(model, PreTrainedModel):
        raise ModelRefused(
            f"model factory: it returned {type(model).__name__}: return a transformers "
            "PreTrainedModel with a causal language model's head"
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not tensor.is_meta:
            raise ModelRefused(
                f"model factory: {name} is on {tensor.device}: make the model without .to(), "
                ".cuda() or from_pretrained; weights are filled in later (model.path)"
            )
    if model.config._attn_implementation != IMPLEMENTATION:  # it made a configuration of its own
        model.set_attn_implementation(IMPLEMENTATION)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def check_model(config: PretrainedConfig, factory: ModelFactory | None = None) -> PreTrainedModel:
    """Runs the model on the meta device and raises ModelRefused for what its code would ignore.

    Every layer must attend through FlexRay's attention and mix tokens nowhere else, positions must
    be those that it is given, and the logits must be the head's output and nothing else (no
    scaling, no soft cap), since the loss is computed from the head in chunks. Returns the model, on
    the meta device.
    """
    check_config(config)
    model = build_on_meta(config, torch.bfloat16, factory).train()
    config = model.config  # a factory may have made its own
    check_config(config)
    body, head = body_and_head(model)
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            raise ModelRefused(
                f"model {config.model_type}: {name} has dropout {module.p}: set it to 0"
            )
    try:
        whole, stack = Trial(model), Trial(body)
        with Recorder() as last:
            head(stack.out[0])
    except AttentionRefused as error:
        raise ModelRefused(f"model {config.model_type}: {error}; use another model") from None
    except Exception as error:  # whatever a model's own code raises
        raise ModelRefused(
            f"model {config.model_type}: its forward takes no packed sequences: "
            f"{_first_line(error)}; use another model"
        ) from None
    for fault in _faults(config, whole, stack.operations + last.operations):
        raise ModelRefused(f"model {config.model_type}: {fault}; use another model")
    return model


def _faults(config: PretrainedConfig, whole: Trial, parts: list[str]) -> Iterator[str]:
    """What is wrong with a model that ran: the whole of it, and its body and head as `parts`."""
    layers, heads = config.num_hidden_layers, getattr(config, "num_attention_heads", None)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if len(whole.heads) != layers:
        yield (
            f"{len(whole.heads)} of {layers} layers attend through the attention interface, and "
            "the others would ignore the borders between sequences"
        )
    for found in set(whole.heads) - {(heads, kv_heads)}:
        yield f"a layer has (query, key/value) heads {found} and the config says {heads, kv_heads}"
    if operation := whole.ran(RANDOM):
        yield f"it draws random numbers ({operation}), other ones under every plan"
    if whole.mixes_tokens:
        yield f"it mixes tokens outside attention ({whole.mixes_tokens}), across borders and shards"
    if whole.numbers_tokens or not whole.reads_positions:
        yield "it numbers tokens itself, and places in a pack are not places in a sequence"
    if whole.operations != parts:
        extra = whole.operations[len(parts) :] or ["another head"]
        yield (
            f"it computes {extra[0]} after its head (scaled or capped logits), which the chunked "
            "loss would ignore"
        )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def body_and_head(model: PreTrainedModel) -> tuple[nn.Module, nn.Module]:
    """The decoder stack (ids to hidden states) and the output head (hidden states to logits)."""
    body, head = model.base_model, model.get_output_embeddings()
    if body is model or head is None or not hasattr(body, "layers"):
        raise ModelRefused(
            f"model {model.config.model_type}: no stack of layers with an output head was found; "
            "use another model"
        )
    return body, head
