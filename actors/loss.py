"""The loss of a shard, without ever holding the logits of the whole pack.

Body and head live in one module, so that both run inside the root FSDP module's forward (a head
called outside it would mix plain and sharded tensors; tied weights stay in one group).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from flexray.actors.attention.ulysses import SequenceParallel
from flexray.actors.model import body_and_head
from flexray.actors.pack import IGNORE
from flexray.actors.timing import Stopwatch, own_work


class LossModel(nn.Module):
    """A causal language model that returns the sum of its tokens' losses."""

    def __init__(self, model: PreTrainedModel, chunk: int, watch: Stopwatch) -> None:
        """`chunk`: tokens whose logits are in memory at once."""
        super().__init__()
        self.model = model
        self.chunk = chunk
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
        """Ids and positions [1, S], shifted labels [S] to the sum of cross entropies (a scalar).

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
            return F.cross_entropy(wide, targets, ignore_index=IGNORE, reduction="sum")

        losses = [
            checkpoint(chunk_loss, part, targets, use_reentrant=False)
            for part, targets in zip(
                hidden[0].split(self.chunk), labels.split(self.chunk), strict=True
            )
        ]
        return torch.stack(losses).sum()
