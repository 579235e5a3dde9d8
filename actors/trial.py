"""A forward pass on the meta device: what a model's code does, without memory or data.

A configuration does not tell all that a model computes. This shows which operations run, which
layers attend through FlexRay's attention, and with how many heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from flexray.actors.attention.ulysses import SequenceParallel
from flexray.actors.gang import Gang
from flexray.actors.pack import Borders
from flexray.actors.timing import Stopwatch

TOKENS = 13  # unlike any other size, so that a tensor of one entry a token is known by its size
VIEWS = (
    "aten.slice",
    "aten.view",
    "aten.alias",
    "aten.detach",
    "aten.unsqueeze",
    "aten._to_copy",
)
RANDOM = (
    "aten.bernoulli",
    "aten.dropout",
    "aten.exponential",
    "aten.multinomial",
    "aten.native_dropout",
    "aten.normal",
    "aten.rand",
    "aten.uniform",
)
# They carry something from one token to another outside attention, across borders and shards.
MIXING = (
    "aten.convolution",
    "aten.cumprod",
    "aten.cumsum",
    "aten.flip",
    "aten.roll",
    "aten._fft",
)


class Recorder(TorchDispatchMode):
    """The names of the operations that ran, in order, views apart."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if not name.startswith(VIEWS):
            self.operations.append(name)
        return func(*args, **(kwargs or {}))


class Trial(Recorder):
    """One forward pass of `module` over a pack of `TOKENS` tokens, on the meta device.

    Attributes:
        heads: (query heads, key/value heads) of every call of FlexRay's attention.
        reads_positions: whether any operation used the position ids.
        numbers_tokens: whether it made position ids of its own.
        mixes_tokens: the first operation that carried something from one token to another.
        out: what the module returned.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.heads: list[tuple[int, int]] = []
        self.reads_positions = self.numbers_tokens = False
        self.mixes_tokens = ""
        self._positions = torch.arange(TOKENS, device="meta")[None]
        sp = SequenceParallel(Gang((0,), 0, None, Stopwatch()), Borders([TOKENS]), "sdpa")
        sp.kernel = self._kernel
        ids = torch.zeros((1, TOKENS), dtype=torch.long, device="meta")
        with self:
            self.out = module(
                input_ids=ids,
                position_ids=self._positions,
                attention_mask=None,
                use_cache=False,
                sp=sp,
            )

    def ran(self, names: tuple[str, ...]) -> str | None:
        """The first operation that is one of `names`."""
        return next((o for o in self.operations if o.startswith(names)), None)

    def _kernel(
        self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, *_: Any
    ) -> torch.Tensor:
        self.heads.append((q_THD.shape[1], k_TKD.shape[1]))
        return torch.empty_like(q_THD)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        self.reads_positions |= any(x is self._positions for x in args)
        if name.startswith(MIXING) and any(TOKENS in getattr(x, "shape", ()) for x in args):
            self.mixes_tokens = self.mixes_tokens or name
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.numbers_tokens |= name.startswith("aten.arange") and out.numel() == TOKENS
        return out
