"""Memory of a token and of the logits, from peaks at growing numbers of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy.optimize import nnls

from flexray.solver.memory import POINTS, Peak


@dataclass(frozen=True)
class Memory:
    """What a rank's memory is made of.

    Attributes:
        fixed_mb: without tokens: model states, buffers, the process itself on a CPU.
        mb_per_token: of activations.
        logits_mb: of the logits that are held at a time (model.loss_chunk tokens).
    """

    fixed_mb: float
    mb_per_token: float
    logits_mb: float


def fit_memory(peaks: Sequence[Peak], loss_chunk: int) -> Memory | None:
    """A non-negative least-squares fit of the peaks; None where they do not tell.

    The first peak may be the start's, not the step's, and a process's peak only grows: on CPUs
    steps that stay under an older peak tell nothing.
    """
    told = [b for a, b in pairwise(peaks) if b.mb > a.mb]
    if len(told) < POINTS:
        return None
    tokens = np.array([p.tokens for p in told], dtype=np.float64)
    held = np.minimum(tokens, loss_chunk)
    design = np.stack([np.ones(len(told)), tokens, held], axis=1)
    if np.ptp(held) == 0 or (held == tokens).all():  # logits cannot be told from the rest
        design[:, 2] = 0.0
    (fixed, each, logits), _ = nnls(design, np.array([p.mb for p in told]))
    if each == 0:
        return None
    return Memory(float(fixed), float(each), float(logits) * loss_chunk)
