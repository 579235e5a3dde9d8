"""Whose turn it is: draws dealt to parties by weight, to within a few draws at any time.

Two parties of weights a and b: of the first n draws the first party has n * a / (a + b), rounded.
More parties: the first one against all others, the second against the rest, and so on, the
heaviest first. So any draw is found without those before it, and after any number of draws no
party of m is further from its share than (1 + H(m)) / 2 draws, H(m) = 1 + 1/2 + ... + 1/m: each
rounding is off by 1/2 at most, and reaches party j as w_j / R_i of itself, where R_i, the weight
that was left at rounding i, is at least (j - i + 1) * w_j.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

RESOLUTION = 10**6
"""Weights are rounded to this fraction of their sum."""

MAX_DRAWS = 1 << 43  # draws times a weight must fit 63 bits

_Ints = npt.NDArray[np.int64]


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """The weights as small whole numbers; 0 for one that is less than half a millionth of all."""
    # Scaled by a power of two, so that no ratio changes and large ones have a sum.
    _, exponent = math.frexp(max(weights))
    weights = [math.ldexp(weight, -exponent) for weight in weights]
    total = math.fsum(weights)
    whole = [round(weight / total * RESOLUTION) for weight in weights]
    common = math.gcd(*whole)
    return tuple(weight // common for weight in whole)


def dealt(draws: int, weights: Sequence[int]) -> list[int]:
    """How many of the first `draws` each party has had; see `deal`."""
    had, left = [0] * len(weights), sum(weights)
    for i in _heaviest_first(weights):
        had[i] = (draws * weights[i] + left // 2) // left
        draws, left = draws - had[i], left - weights[i]
    return had


def deal(draws: _Ints, weights: Sequence[int]) -> tuple[_Ints, _Ints]:
    """Who has each of `draws`, and how many draws that party has had before, (n,) each.

    Args:
        draws: (n,) numbers of draws, counted from 0, below `MAX_DRAWS`.
        weights: whole numbers above 0, of up to `RESOLUTION` in all.
    """
    party, before = np.empty_like(draws), np.empty_like(draws)
    where, count, left = np.arange(len(draws)), draws, sum(weights)
    for i in _heaviest_first(weights):
        weight = weights[i]
        had = (count * weight + left // 2) // left
        has = ((count + 1) * weight + left // 2) // left > had
        party[where[has]], before[where[has]] = i, had[has]
        where, count, left = where[~has], (count - had)[~has], left - weight
    return party, before


def _heaviest_first(weights: Sequence[int]) -> list[int]:
    return sorted(range(len(weights)), key=lambda i: -weights[i])
