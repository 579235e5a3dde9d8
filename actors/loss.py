"""The loss of a shard, without ever holding the logits of the whole pack.

Body and head live in one module, so that both run inside the root FSDP module's forward (a head
called outside it would mix plain and sharded tensors; tied weights stay in one group).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from flexray.actors.attention.ulysses import SequenceParallel
from flexray.actors.model import ModelRefused, body_and_head
from flexray.actors.pack import IGNORE
from flexray.actors.timing import Stopwatch, own_work

TokenLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Logits [T, V] and labels [T] to each token's loss [T]."""
    return F.cross_entropy(logits, labels, reduction="none")


def check_token_loss(token_loss: TokenLoss, vocab_size: int) -> None:
    """Raises ModelRefused unless `token_loss` gives each token a loss that is its own.

    Tokens of a sequence are on several ranks and in several chunks: a mean over those that happen
    to be together would be another number under every plan.
    """
    torch_state = torch.random.get_rng_state()
    logits = torch.randn(
        (4, vocab_size),
        dtype=torch.float64,
        generator=torch.Generator().manual_seed(0),
        requires_grad=True,
    )
    labels = torch.arange(4) % vocab_size
    losses = token_loss(logits, labels)
    if losses.shape != labels.shape:
        raise ModelRefused(
            f"loss: it returned shape {tuple(losses.shape)} for 4 tokens: return one loss a token "
            "(reduction='none')"
        )
    if not losses.requires_grad:
        raise ModelRefused("loss: what it returned has no gradient: compute it from the logits")
    alone = torch.cat([token_loss(logits[i : i + 1], labels[i : i + 1]) for i in range(4)])
    if not torch.equal(torch.random.get_rng_state(), torch_state):
        raise ModelRefused("loss: it draws random numbers, other ones under every plan")
    if not torch.allclose(losses, alone, rtol=1e-9):
        raise ModelRefused(
            "loss: a token's loss depends on the tokens beside it, which differ from plan to plan"
        )


class LossModel(nn.Module):
    """A causal language model that returns the sum of its tokens' losses."""

    def __init__(
        self,
        model: PreTrainedModel,
        chunk: int,
        watch: Stopwatch,
        token_loss: TokenLoss = cross_entropy,
    ) -> None:
        """`chunk`: tokens whose logits are in memory at once.

        `token_loss` is given wide logits [T, V] and labels [T], and returns losses [T]; label 0
        stands for ignored ones, whose losses do not count.
        """
        super().__init__()
        self.model = model
        self.chunk = chunk
        self.token_loss = token_loss
        self.timed_loss = own_work(self.summed_loss, watch)

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers."""
        return body_and_head(self.model)[0].layers

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        labels: torch.Tensor,
        sp: SequenceParallel,
    ) -> torch.Tensor:
        """Ids and positions [1, S], shifted labels [S] to the sum of their losses (a scalar).

        The sum is float64 for a float64 model and float32 otherwise. A shard without labels runs
        the head all the same: its gradients are zero, never None.
        """
        hidden = body_and_head(self.model)[0](
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=None,
            use_cache=False,
            sp=sp,
        )[0]
        return self.timed_loss(hidden, labels)

    def summed_loss(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Hidden states [1, S, E] and labels [S] to the summed loss, chunk by chunk."""
        head = body_and_head(self.model)[1]

        def chunk_loss(part: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            logits = head(part)
            wide = logits if logits.dtype == torch.float64 else logits.float()
            losses = self.token_loss(wide, targets.clamp_min(0))
            return losses.masked_fill(targets == IGNORE, 0).sum()

        losses = [
            checkpoint(chunk_loss, part, targets, use_reentrant=False)
            for part, targets in zip(
                hidden[0].split(self.chunk), labels.split(self.chunk), strict=True
            )
        ]
        return torch.stack(losses).sum()
