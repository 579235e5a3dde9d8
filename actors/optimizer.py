"""AdamW over sharded parameters (Loshchilov and Hutter, ICLR 2019, arXiv 1711.05101)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def adamw(
    parameters: Iterable[nn.Parameter], *, betas: tuple[float, float], weight_decay: float
) -> torch.optim.AdamW:
    """AdamW in two groups: matrices decay, parameters of one dimension (norms, biases) do not.

    Frozen ones never get a state, since they have no gradient. Fused on CUDA.
    """
    parameters = list(parameters)
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ],
        betas=betas,
        fused=parameters[0].device.type == "cuda",
    )


def make_state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, updates: int = 0) -> None:
    """Gives `parameter` the state that AdamW has after `updates` steps, with moments of zero."""
    device = parameter.device if optimizer.defaults.get("fused") else "cpu"
    optimizer.state[parameter] = {
        "step": torch.tensor(float(updates), dtype=torch.float32, device=device),
        "exp_avg": torch.zeros_like(parameter.detach()),
        "exp_avg_sq": torch.zeros_like(parameter.detach()),
    }


def clip(parameters: Iterable[nn.Parameter], limit: float) -> float:
    """Scales the gradients so that their global norm is at most `limit`; returns what it was.

    A collective call; every rank gets the same number. A norm that is not finite leaves the
    gradients without use.
    """
    found = [p for p in parameters if p.grad is not None]
    total = torch.nn.utils.get_total_norm([p.grad for p in found])
    norm = total.full_tensor() if isinstance(total, DTensor) else total
    torch.nn.utils.clip_grads_with_norm_(found, limit, norm)
    return float(norm)
