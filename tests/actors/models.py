"""Small models, batches and plans for numeric tests, and the reference: one process, one sequence
at a time, plain transformers attention."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from flexray.actors.engine import Engine
from flexray.actors.loss import TokenLoss
from flexray.actors.model import ModelFactory, build_on_meta
from flexray.actors.pack import Tokens, shift
from flexray.actors.settings import EngineSettings
from flexray.actors.sharding import random_parameters
from flexray.actors.work import RankMicroStep, RankStep
from flexray.solver.communicators import CommunicatorCache

VOCAB = 211

# A micro-step: (ranks, rows) of every group. Ranks in none idle.
MicroStepOf = list[tuple[tuple[int, ...], tuple[int, ...]]]


def config(kind: str = "llama", *, heads: int = 8, kv: int = 2, **keys) -> PretrainedConfig:
    """Two layers, hidden size 64."""
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,
    }
    if kind == "qwen3":
        settings["head_dim"] = 8
    return AutoConfig.for_model(kind, **(settings | keys))


def sequences(lengths: Sequence[int], seed: int = 3) -> list[Tokens]:
    """Random token ids of these lengths, all of them to be predicted."""
    random = np.random.default_rng(seed)
    return [(random.integers(0, VOCAB, n), None) for n in lengths]


def label_tokens(batch: Sequence[Tokens]) -> int:
    """Label tokens of a batch after the shift."""
    return sum(int((shift(t if y is None else y) != -100).sum()) for t, y in batch)


def reference_model(
    hf_config: PretrainedConfig,
    dtype: torch.dtype,
    seed: int = 0,
    implementation: str = "sdpa",
    factory: ModelFactory | None = None,
):
    """The whole model in one process with the engine's random values."""
    if factory is None:
        model = AutoModelForCausalLM.from_config(
            hf_config, dtype=dtype, attn_implementation=implementation
        )
    else:
        own = copy.deepcopy(hf_config)
        own._attn_implementation = implementation
        model = factory(own).to(dtype)
    parameters = dict(model.named_parameters())
    blueprint = build_on_meta(hf_config, torch.float32, factory)
    with torch.no_grad():
        for name, value in random_parameters(blueprint, seed):
            parameters[name].copy_(value)
    return model


def reference_loss(
    model: torch.nn.Module, batch: Sequence[Tokens], token_loss: TokenLoss | None = None
) -> torch.Tensor:
    """Mean loss over the batch's label tokens, every sequence alone; gradients are accumulated."""
    total = label_tokens(batch)
    loss = torch.zeros((), dtype=torch.float64)
    for tokens, labels in batch:
        if len(tokens) == 0:
            continue
        logits = model(input_ids=torch.from_numpy(tokens)[None], use_cache=False).logits[0]
        wide = logits if logits.dtype == torch.float64 else logits.float()
        targets = torch.from_numpy(shift(tokens if labels is None else labels))
        if token_loss is None:
            part = F.cross_entropy(wide, targets, reduction="sum", ignore_index=-100)
        else:
            part = token_loss(wide[targets != -100], targets[targets != -100]).sum()
        part = part / max(1, total)
        part.backward()
        loss += part.detach().double()
    return loss


def work_of(
    rank: int,
    micro_steps: Sequence[MicroStepOf],
    total: int,
    communicators: CommunicatorCache,
    step: int = 1,
    generation: int = 0,
) -> RankStep:
    """This rank's part of a hand-written plan."""
    parts = []
    for groups in micro_steps:
        own = [RankMicroStep(ranks, rows) for ranks, rows in groups if rank in ranks]
        parts.append(own[0] if own else RankMicroStep((rank,), ()))
    changes = communicators.prepare([ranks for m in micro_steps for ranks, _ in m])
    return RankStep(step, generation, total, tuple(parts), changes)


def engine(
    rank: int,
    world: int,
    store,
    batch: Sequence[Tokens],
    hf_config: PretrainedConfig,
    generation: int = 0,
    **settings,
) -> Engine:
    """An engine over the rows of `batch`."""
    return Engine(
        EngineSettings(model=hf_config, **settings),
        batch.__getitem__,
        store=store,
        generation=generation,
        rank=rank,
        world=world,
    )


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Whole gradients by parameter name (a collective call on a sharded model)."""
    return {
        # A copy: where nothing is sharded, the whole tensor is the gradient itself.
        name: p.grad.full_tensor().clone() if hasattr(p.grad, "full_tensor") else p.grad
        for name, p in model.named_parameters()
    }


def worst_difference(ours: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """Largest error of any gradient, relative to the largest entry of its parameter's gradient."""
    assert ours.keys() == right.keys()
    return max(
        float((ours[name] - right[name]).abs().max() / right[name].abs().max().clamp_min(1e-30))
        for name in right
    )
