"""A training step written plainly with transformers, to compare the engine with."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from flexray.actors.model import build_on_meta
from flexray.actors.pack import Tokens
from flexray.actors.settings import EngineSettings
from flexray.actors.sharding import random_parameters


def padded_batches(batch: Sequence[Tokens]) -> list[list[Tokens]]:
    """Sequences of like length together, no batch with more padded tokens than the longest has."""
    rows = sorted(batch, key=lambda row: -len(row[0]))
    limit = len(rows[0][0])
    batches: list[list[Tokens]] = []
    for row in rows:
        if batches and (len(batches[-1]) + 1) * len(batches[-1][0][0]) <= limit:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def plain_model(settings: EngineSettings, device: torch.device) -> PreTrainedModel:
    """Float32 weights, the engine's own random ones."""
    model = AutoModelForCausalLM.from_config(
        settings.model, dtype=torch.float32, attn_implementation="sdpa"
    )
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in random_parameters(
            build_on_meta(settings.model, torch.float32), settings.seed
        ):
            parameters[name].copy_(value)
    if settings.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.to(device).train()


def plain_optimizer(model: PreTrainedModel) -> torch.optim.AdamW:
    """AdamW over all parameters."""
    fused = next(model.parameters()).device.type == "cuda"
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)


def plain_step(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    parts: list[list[Tokens]],
    settings: EngineSettings,
) -> tuple[float, float]:
    """One step over batches of sequences, padded to their longest; the model's own loss.

    Returns the loss, a mean over the step's label tokens, and the gradient norm.
    """
    device = next(model.parameters()).device
    labels_of_step = sum(len(tokens) - 1 for part in parts for tokens, _ in part)
    half = settings.dtype == "bfloat16"
    loss_of_step = torch.zeros((), device=device)
    optimizer.zero_grad()
    for part in parts:
        longest = max(len(tokens) for tokens, _ in part)
        ids = torch.zeros((len(part), longest), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, (tokens, _) in enumerate(part):
            ids[row, : len(tokens)] = torch.from_numpy(tokens)
            mask[row, : len(tokens)] = 1
        labels = ids.masked_fill(mask == 0, -100)
        with torch.autocast(device.type, torch.bfloat16) if half else nullcontext():
            loss = model(
                input_ids=ids.to(device),
                attention_mask=mask.to(device) if len(part) > 1 else None,
                labels=labels.to(device),
                num_items_in_batch=labels_of_step,
                use_cache=False,
            ).loss
        loss.backward()
        loss_of_step += loss.detach()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm)
    optimizer.step()
    return loss_of_step.item(), norm.item()
