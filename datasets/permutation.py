"""A seeded random order of n things that takes no memory.

A balanced Feistel network permutes [0, 4^k), the smallest such range that holds n; values of n or
more are permuted again until they fall below it ("cycle walking": Black and Rogaway, Ciphers with
Arbitrary Finite Domains, 2002), which is at most 4 times on average.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_ROUNDS = 8  # 4 are enough for large ranges; a range of 4 or 16 mixes only one or two bits a round
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class Permutation:
    """A bijection of [0, size) chosen by (seed, epoch, stream); any element in O(1)."""

    def __init__(self, size: int, seed: int, epoch: int, stream: int = 0) -> None:
        self.size = size
        self._half_bits = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
        self._mask = (np.uint64(1) << self._half_bits) - np.uint64(1)
        self._keys = np.random.SeedSequence([seed, epoch, stream]).generate_state(
            _ROUNDS, np.uint64
        )

    def __call__(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Element at each of `positions`, (n,) int64 in [0, size)."""
        values = self._encrypt(positions.astype(np.uint64))
        while (outside := values >= self.size).any():
            values[outside] = self._encrypt(values[outside])
        return values.astype(np.int64)

    def _encrypt(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left, right = values >> self._half_bits, values & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right + key) & self._mask)
        return (left << self._half_bits) | right


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014); arithmetic is modulo 2^64."""
    x = x * _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))
