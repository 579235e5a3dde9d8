"""What a token takes of a GPU's memory, from the peaks that ranks report of their steps.

    peak_mb = fixed_mb + mb_per_token * tokens        of the largest share of a pack that it had

The line lies over all peaks, not through their middle: a plan that fits half of the time does not.
Where all shares are about as large (plans fill the ranks) they tell no line: then all that is there
beside the model states is the tokens', which is too much for larger shares and never too little.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from flexray.solver.cost import CostModel

POINTS = 4  # different numbers of tokens that a line is told from, at least,
SPREAD = 1.5  # and the largest over the smallest
LARGE = 0.95  # of the largest share: shares that tell what still larger ones take


class Peak(NamedTuple):
    """Most memory of a rank in a step, and the tokens of the largest share that it had in it."""

    tokens: int
    mb: float


def with_peaks(cost: CostModel, peaks: npt.ArrayLike, gpus: int, least_tokens: int) -> CostModel:
    """`cost` with the memory terms that the peaks tell; as it was where they tell none.

    `peaks`: Peaks, or (n, 2) of their numbers. States are counted, not learned: what peaks show
    beyond them is `buffers_mb`.
    """
    numbers = np.asarray(peaks, dtype=np.float64).reshape(-1, 2)
    tokens, measured = numbers[numbers[:, 0] > 0].T
    if len(tokens) < POINTS:
        return cost
    states_mb = cost.states_mb(gpus)
    if len(np.unique(tokens)) >= POINTS and tokens.max() >= SPREAD * tokens.min():
        design = np.stack([np.ones(len(tokens)), tokens], axis=1)
        line, _ = nnls(design, measured)
        fixed_mb, mb_per_token = map(float, line)
        fixed_mb += float((measured - design @ line).max())
    else:
        is_large = tokens >= LARGE * tokens.max()
        each = (measured - states_mb)[is_large] / tokens[is_large]
        fixed_mb, mb_per_token = states_mb, float(each.max())
    if mb_per_token <= 0:
        return cost
    buffers_mb = max(0.0, fixed_mb - states_mb)
    return with_memory(cost, buffers_mb, mb_per_token, gpus, least_tokens)


def with_memory(
    cost: CostModel, buffers_mb: float, mb_per_token: float, gpus: int, least_tokens: int
) -> CostModel:
    """`cost` with these memory terms, or with lower ones.

    `least_tokens` stay possible on each GPU where they were. A capacity that was given
    (tokens_per_gpu) holds.
    """
    if cost.tokens_per_gpu is not None:
        return cost
    room_mb = cost.usable_mb - cost.fixed_mb(gpus)
    were_possible = room_mb >= least_tokens * cost.mb_per_token
    room_mb += cost.buffers_mb
    if were_possible and room_mb - buffers_mb < least_tokens * mb_per_token:
        # A little less: rounding is not to take the last token.
        buffers_mb, mb_per_token = 0.0, min(mb_per_token, (1 - 1e-9) * room_mb / least_tokens)
    return replace(cost, buffers_mb=buffers_mb, mb_per_token=mb_per_token)
