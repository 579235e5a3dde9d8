"""The learning rate of each update."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def learning_rate(
    update: int, *, schedule: Schedule, peak: float, floor: float, warmup: int, updates: int
) -> float:
    """The rate of update number `update` (the first is 1) of a run of `updates`.

    It grows linearly from 0 and is `peak` at update `warmup`; then it stays (constant) or falls
    (linear, or half a cosine: Loshchilov and Hutter, ICLR 2017, arXiv 1608.03983) to `floor` at the
    last update. These are transformers' schedules, one update earlier: the first is not lost on a
    rate of 0.
    """
    if update < warmup:
        return peak * update / warmup
    if schedule == "constant":
        return peak
    gone = min(1.0, (update - warmup) / max(1, updates - warmup))
    left = 1 - gone if schedule == "linear" else (1 + math.cos(math.pi * gone)) / 2
    return floor + (peak - floor) * left
