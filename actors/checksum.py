"""A checksum of a tensor that is sharded: a sum over its parts, however it is split.

Every 16 or 32 bits of the whole tensor are a word, in a row and a block by their place in it. A
word counts times an odd weight of its place, mod 2^64: an element that differs changes the sum, and
values that change places do too. Bits are bits: -0.0 is not 0.0, and one NaN not another.
"""

from __future__ import annotations

from functools import cache

import torch

_WORDS = 512  # in a row
_ROWS = 256  # in a block, which fits into a core's cache
_KINDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def checksum(values: torch.Tensor, start: int) -> torch.Tensor:
    """The share that elements `start` and on of a flattened tensor have in its checksum.

    values: [elements], contiguous. Returns an int64 scalar on its device; sums of shares wrap.
    """
    words = values.view(_KINDS[values.itemsize])
    place = start * (values.itemsize // words.itemsize)
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    row_weights, column_weights = _weights(values.device)
    while len(words):
        row, column = divmod(place, _WORDS)
        block, row = divmod(row, _ROWS)
        if column or len(words) < _WORDS:  # what there is of one row
            part = words[: _WORDS - column]
            rows = part.new_zeros((1, _WORDS), dtype=torch.int64)
            rows[0, column : column + len(part)] = part
        else:  # whole rows of one block
            part = words[: min(_ROWS - row, len(words) // _WORDS) * _WORDS]
            rows = part.view(-1, _WORDS).to(torch.int64)
        # One weight a row and one a column: sums are several times as fast as a product each.
        share = (rows.sum(1) * row_weights[row : row + len(rows)]).sum()
        share += (rows.sum(0) * column_weights).sum()
        total += share * _block_weight(block)
        place += len(part)
        words = words[len(part) :]
    return total


@cache
def _weights(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the rows of a block, even, and of its columns, odd: so the sum of the two is odd."""
    random = torch.Generator().manual_seed(0)
    rows, columns = (
        torch.randint(-(1 << 62), 1 << 62, (n,), generator=random) for n in (_ROWS, _WORDS)
    )
    return (2 * rows).to(device), (2 * columns + 1).to(device)


def _block_weight(block: int) -> int:
    """An odd number of 64 bits, signed, and another one for every block."""
    mixed = (2 * block + 1) * 0x9E3779B97F4A7C15 % (1 << 64)
    return mixed - (1 << 64) if mixed >> 63 else mixed
