"""How far each attention backend is from float32, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from flexray.actors.attention.backends import KERNELS, Kernel, available_backends, sdpa
from flexray.actors.pack import Borders

# bfloat16 keeps 8 bits: 0.4% a rounding, and a few of them meet in an entry.
TOLERANCE = 2e-2


@dataclass(frozen=True)
class AttentionCheck:
    """Errors of one backend on one pack, each relative to the largest entry of the right tensor."""

    backend: str
    pack: str
    errors: dict[str, float]  # of output, dq, dk, dv; empty if it failed
    failure: str = ""

    @property
    def ok(self) -> bool:
        """Whether the backend ran and is as near to float32 as bfloat16 can be."""
        return not self.failure and all(error <= TOLERANCE for error in self.errors.values())


def packs(longest: int) -> dict[str, list[int]]:
    """Lengths that kernels have got wrong: single tokens, primes, one long among short ones."""
    return {
        "ones and primes": [1, 2, 3, 1, 7, 13, 127, 131, 1],
        "even blocks": [128, 64, 256],
        "one long": [5, longest, 17],
    }


def check_attention(
    device: torch.device, longest: int, heads: int = 16, kv_heads: int = 4, size: int = 64
) -> Iterator[AttentionCheck]:
    """Every usable backend in bfloat16 against SDPA in float32, grouped-query heads."""
    for backend in available_backends():
        if not backend.usable:
            continue
        for name, lengths in packs(longest).items():
            try:
                errors = _errors(device, KERNELS[backend.name], lengths, heads, kv_heads, size)
            except Exception as error:  # whatever a kernel raises is what is to be known
                line = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                yield AttentionCheck(backend.name, name, {}, line)
            else:
                yield AttentionCheck(backend.name, name, errors)


def _errors(
    device: torch.device, kernel: Kernel, lengths: list[int], heads: int, kv_heads: int, size: int
) -> dict[str, float]:
    generator = torch.Generator(device).manual_seed(0)
    tokens, borders = sum(lengths), Borders(lengths)

    def random(heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, size, generator=generator, device=device).bfloat16()

    inputs = [random(heads), random(kv_heads), random(kv_heads)]
    weight = random(heads)

    def run(kernel: Kernel, dtype: torch.dtype) -> list[torch.Tensor]:
        q, k, v = (x.to(dtype).requires_grad_() for x in inputs)
        out = kernel(q, k, v, borders, size**-0.5)
        (out * weight.to(dtype)).sum().backward()
        return [out.detach().float(), *(x.grad.float() for x in (q, k, v))]

    with sdpa_kernel(SDPBackend.MATH) if device.type == "cuda" else nullcontext():
        right = run(sdpa, torch.float32)
    ours = run(kernel, torch.bfloat16)
    return {
        name: float((a - b).abs().max() / b.abs().max())
        for name, a, b in zip(("output", "dq", "dk", "dv"), ours, right, strict=True)
    }
