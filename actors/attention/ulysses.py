"""Ulysses sequence parallelism (DeepSpeed-Ulysses, arXiv 2309.14509) for Hugging Face models.

Shapes: S tokens of this rank's shard, P ranks of the gang, T = P * S tokens of the pack,
H query heads, K key/value heads, D head size. One all-to-all turns sequence shards of q, k and v
into head shards of the whole pack, a second one turns the output back.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from flexray.actors.attention.backends import KERNELS
from flexray.actors.gang import Gang
from flexray.actors.pack import Borders

IMPLEMENTATION = "flexray"
"""The attention implementation's name in Hugging Face configs."""

# What transformers hands to every attention function and what changes nothing here. Any other
# keyword (sliding_window, softcap, s_aux, ...) asks for something that we would ignore.
HARMLESS = {"position_ids", "use_cache", "cache_position", "output_attentions", "return_dict"}


class AttentionRefused(ValueError):
    """The model asks for a kind of attention that is not plain, full and causal."""


class SequenceParallel:
    """What attention must know of the present micro-step; goes through the model as a keyword."""

    def __init__(self, gang: Gang, borders: Borders, backend: str) -> None:
        self.gang = gang
        self.borders = borders
        self.kernel = KERNELS[backend]


class AllToAll(torch.autograd.Function):
    """Equal-split all-to-all over dim 0 ([P, ...] to [P, ...]); its own adjoint."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gang: Gang) -> torch.Tensor:  # noqa: D102
        ctx.gang = gang
        return gang.all_to_all(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: D102
        return ctx.gang.all_to_all(grads[0]), None


def key_value_heads(heads: int, kv_heads: int, degree: int) -> tuple[int, list[int]]:
    """Which key/value heads each rank of the gang needs.

    Returns (heads a rank, indices rank by rank); inside a rank, local query head i attends to local
    key/value head i // (local query heads / heads a rank). Raises ValueError for a degree that
    the planner must not choose.
    """
    if heads % degree or (kv_heads % degree and degree % kv_heads):
        raise ValueError(
            f"degree {degree} is not legal for {heads} heads, {kv_heads} key/value heads"
        )
    per_rank = max(1, kv_heads // degree)
    return per_rank, [
        rank * kv_heads // degree + i for rank in range(degree) for i in range(per_rank)
    ]


def attend(
    q_SHD: torch.Tensor,
    k_SKD: torch.Tensor,
    v_SKD: torch.Tensor,
    sp: SequenceParallel,
    scale: float,
) -> torch.Tensor:
    """Causal attention of the pack, from this rank's shards to this rank's shard [S, H, D]."""
    P = sp.gang.degree
    if q_SHD.shape[0] * P != sp.borders.tokens:
        # Kernels would read or write past the last border: NaN gradients without an error.
        raise ValueError(
            f"{q_SHD.shape[0]} tokens on each of {P} ranks, but cu_seqlens ends at "
            f"{sp.borders.tokens}"
        )
    if P == 1:
        return sp.kernel(q_SHD, k_SKD, v_SKD, sp.borders, scale)
    S, H, D = q_SHD.shape
    K = k_SKD.shape[1]
    h = H // P
    k, indices = key_value_heads(H, K, P)
    if indices != list(range(K)):  # replicated; the backward of index_select sums the replicas
        index = torch.tensor(indices, device=k_SKD.device)
        k_SKD, v_SKD = k_SKD.index_select(1, index), v_SKD.index_select(1, index)
    qkv = torch.cat([x.view(S, P, -1, D) for x in (q_SHD, k_SKD, v_SKD)], 2).transpose(0, 1)
    qkv = AllToAll.apply(qkv, sp.gang).reshape(P * S, h + 2 * k, D)
    q_ThD, k_TkD, v_TkD = qkv.split([h, k, k], 1)
    out_ThD = sp.kernel(q_ThD, k_TkD, v_TkD, sp.borders, scale)
    out_PShD = AllToAll.apply(out_ThD.reshape(P, S, h, D), sp.gang)
    return out_PShD.transpose(0, 1).reshape(S, H, D)


def flexray_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, H, S, D]
    key: torch.Tensor,  # [1, K, S, D]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    sp: SequenceParallel | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as Hugging Face models call it.

    Raises AttentionRefused for what it would ignore.
    """
    harmless = HARMLESS | ({"is_causal"} if keywords.get("is_causal") else set())
    refused = [
        k for k, v in keywords.items() if v is not None and v is not False and k not in harmless
    ]
    if not getattr(module, "is_causal", True) or keywords.get("is_causal") is False:
        refused.append("is_causal=False")
    if dropout:
        refused.append("attention dropout")
    if attention_mask is not None:
        refused.append("attention_mask")
    if sp is None:
        refused.append("a call without sequence-parallel context")
    if not query.shape[2:] == key.shape[2:] == value.shape[2:]:
        refused.append("keys or values of another shape than the queries")
    if query.shape[0] != 1:
        refused.append(f"a batch of {query.shape[0]} (sequences are packed)")
    if refused or sp is None:
        raise AttentionRefused(
            f"{type(module).__name__} asks for {', '.join(refused)}, which FlexRay's attention "
            "would ignore: only plain full causal attention can be trained"
        )
    q_SHD, k_SKD, v_SKD = (x[0].transpose(0, 1) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attend(q_SHD, k_SKD, v_SKD, sp, scale)[None], None


# No mask function goes with this name, so that transformers builds none.
AttentionInterface.register(IMPLEMENTATION, flexray_attention)
