"""A checksum of a tensor that is sharded: a sum over its parts, however it is split.

Every 16 or 32 bits of the tensor are a word, by their place in the whole. A word counts times an
odd weight of its place, in integers mod 2^64: any one word that differs changes the sum, and two
words of a block that change places do too. Bits are bits: -0.0 is not 0.0 and NaNs differ.
"""

from __future__ import annotations

from functools import cache

import torch

# Words in a block: what is in flight of one fits into a core's cache.
BLOCK = 1 << 15
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def checksum(values: torch.Tensor, start: int) -> torch.Tensor:
    """The share that elements `start` and on of a flattened tensor have in its checksum.

    values: [elements], contiguous. Returns an int64 scalar on its device; sums of shares wrap.
    """
    words = values.view(_WORDS[values.itemsize])
    place = start * (values.itemsize // words.itemsize)
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    weights = _weights(values.device)
    while len(words):
        block, offset = divmod(place, BLOCK)
        part = words[: BLOCK - offset]
        wide = part.to(torch.int64).mul_(weights[offset : offset + len(part)])
        total += wide.sum() * _block_weight(block)
        place += len(part)
        words = words[len(part) :]
    return total


@cache
def _weights(device: torch.device) -> torch.Tensor:
    """Odd weights below 2^31 of the places in a block, all different."""
    # Each step permutes the numbers below 2^30.
    mixed = torch.arange(BLOCK)
    for factor in (0x2545F491, 0x1B873593):
        mixed = (mixed ^ (mixed >> 15)) * factor % (1 << 30)
    return (2 * mixed + 1).to(device)


def _block_weight(block: int) -> int:
    """An odd weight, as a signed 64-bit integer."""
    mixed = (block + 1) * 0x9E3779B97F4A7C15 % (1 << 64)
    mixed = (mixed ^ (mixed >> 32)) * 0xBF58476D1CE4E5B9 % (1 << 64) | 1
    return mixed - (1 << 64) if mixed >> 63 else mixed
