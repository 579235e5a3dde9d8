"""Causal attention over a pack: flash-attn, torch's varlen_attn, or SDPA sequence by sequence.

Every kernel takes q_THD, k_TKD, v_TKD (T tokens of the whole pack, H query heads, K key/value
heads, D head size) and the pack's borders, and never attends across a border.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F

from flexray.actors.pack import Borders

Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Borders, float], torch.Tensor]


def sdpa(
    q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, borders: Borders, scale: float
) -> torch.Tensor:
    """One scaled_dot_product_attention a sequence: any device, any dtype, exact in float64."""
    gqa = q_THD.shape[1] != k_TKD.shape[1]
    outputs = []
    for start, stop in borders.spans:
        q, k, v = (x[start:stop].transpose(0, 1)[None] for x in (q_THD, k_TKD, v_TKD))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


def varlen(
    q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, borders: Borders, scale: float
) -> torch.Tensor:
    """torch.nn.attention.varlen: one kernel for the whole pack. CUDA, bfloat16 or float16."""
    from torch.nn.attention.varlen import varlen_attn

    cu_seqlens = borders.on(q_THD.device)
    grouped = q_THD.shape[1] // k_TKD.shape[1]
    keywords = {}
    if grouped > 1 and "enable_gqa" in _varlen_parameters():
        keywords["enable_gqa"] = True
    elif grouped > 1:  # an older torch
        k_TKD, v_TKD = (x.repeat_interleave(grouped, 1) for x in (k_TKD, v_TKD))
    return varlen_attn(
        q_THD.contiguous(),
        k_TKD.contiguous(),
        v_TKD.contiguous(),
        cu_seqlens,
        cu_seqlens,
        borders.longest,
        borders.longest,
        scale=scale,
        window_size=(-1, 0),  # causal
        **keywords,
    )


@cache
def _varlen_parameters() -> frozenset[str]:
    """Names of varlen_attn's parameters; none where this torch has no such function."""
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return frozenset()
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(inspect.signature(varlen_attn).parameters)


def flash(
    q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, borders: Borders, scale: float
) -> torch.Tensor:
    """flash-attn's varlen kernel for the whole pack. CUDA, bfloat16 or float16."""
    from flash_attn import flash_attn_varlen_func

    cu_seqlens = borders.on(q_THD.device)
    return flash_attn_varlen_func(
        q_THD,
        k_TKD,
        v_TKD,
        cu_seqlens,
        cu_seqlens,
        borders.longest,
        borders.longest,
        softmax_scale=scale,
        causal=True,
    )


KERNELS: dict[str, Kernel] = {"flash": flash, "varlen": varlen, "sdpa": sdpa}


@dataclass(frozen=True)
class Backend:
    """One way to compute attention, and whether this machine has it."""

    name: str
    usable: bool
    why: str


@cache
def available_backends() -> list[Backend]:
    """All backends in order of preference, as this machine has them."""
    missing = "" if torch.cuda.is_available() else "needs CUDA"
    flash_fault = _flash_fault() or missing
    has_varlen = "window_size" in _varlen_parameters()
    varlen_fault = missing if has_varlen else "this torch has no causal varlen_attn"
    return [
        Backend("flash", not flash_fault, flash_fault or "flash-attn's varlen kernel"),
        Backend("varlen", not varlen_fault, varlen_fault or "torch.nn.attention.varlen"),
        Backend("sdpa", True, "scaled_dot_product_attention, one call a sequence"),
    ]


def _flash_fault() -> str:
    """Why flash-attn cannot be used, if so. Built for another torch, it fails when imported."""
    if importlib.util.find_spec("flash_attn") is None:
        return "flash-attn is not installed (extra: gpu)"
    if torch.cuda.is_available():
        try:
            from flash_attn import flash_attn_varlen_func  # noqa: F401
        except Exception as error:  # whatever a broken build raises
            return f"flash-attn cannot be imported: {' '.join(str(error).split())}"
    return ""


def choose_backend(wanted: str, dtype: torch.dtype, device: torch.device) -> str:
    """The backend's name for `wanted` ("auto" or a name), the compute dtype and the device.

    Raises ValueError when a backend asked for by name cannot run here.
    """
    half = dtype in (torch.bfloat16, torch.float16)
    for backend in available_backends():
        fits = backend.name == "sdpa" or (backend.usable and half and device.type == "cuda")
        if wanted == "auto" and fits:
            return backend.name
        if wanted == backend.name:
            if fits:
                return wanted
            why = f"it has no {dtype} kernel on {device.type}" if backend.usable else backend.why
            raise ValueError(
                f"model.attention={wanted} cannot be used here: {why}; use auto or sdpa"
            )
    raise ValueError(f"model.attention={wanted} is unknown: use auto, {', '.join(KERNELS)}")
