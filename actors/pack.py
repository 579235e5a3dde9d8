"""A pack: the sequences of one group in one micro-step, concatenated, and the shard of one rank.

Labels are shifted per sequence before the pack is cut, position ids restart per sequence, and the
padding that makes a pack divisible by the degree is a sequence of its own without labels. So a
token's loss never depends on which rank holds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch

IGNORE = -100
INT32_MAX = 2**31 - 1

Tokens = tuple[np.ndarray, np.ndarray | None]
"""One sequence: token ids [S] and, where they differ from them, unshifted labels [S]."""


class Borders:
    """Where the sequences of a pack begin and end (cu_seqlens): the same on all its ranks."""

    def __init__(self, lengths: Sequence[int]) -> None:
        """`lengths`: tokens per sequence, each above 0.

        Raises ValueError for a zero-length sequence (kernels crash on them) and for a pack that
        int32 offsets cannot address.
        """
        if any(n <= 0 for n in lengths):
            raise ValueError(
                "a pack holds a sequence without tokens: filter zero-length rows first"
            )
        if sum(lengths) > INT32_MAX:
            raise ValueError(
                f"a pack of {sum(lengths)} tokens is over {INT32_MAX}, the most that cu_seqlens "
                "(int32) can address: lower the capacity"
            )
        self.cu_seqlens = (0, *accumulate(lengths))
        self.spans = tuple(pairwise(self.cu_seqlens))
        self.longest = max(lengths, default=0)
        self._tensors: dict[torch.device, torch.Tensor] = {}

    @property
    def tokens(self) -> int:
        """Tokens of the whole pack."""
        return self.cu_seqlens[-1]

    def on(self, device: torch.device) -> torch.Tensor:
        """cu_seqlens as an int32 tensor [sequences + 1] on `device`, made once."""
        if device not in self._tensors:
            self._tensors[device] = torch.tensor(self.cu_seqlens, dtype=torch.int32, device=device)
        return self._tensors[device]


@dataclass(frozen=True, eq=False)
class Shard:
    """One rank's part of a pack: S tokens of the pack's S * degree."""

    input_ids: torch.Tensor  # [1, S]
    position_ids: torch.Tensor  # [1, S]
    labels: torch.Tensor  # [S], shifted, IGNORE where nothing is to be predicted
    label_tokens: int
    borders: Borders  # of the whole pack, padding included


EMPTY_PACK: tuple[Tokens, ...] = ((np.zeros(1, np.int64), None),)
"""What a rank without sequences runs, to join every collective: one token without a label."""


def make_shard(
    sequences: Sequence[Tokens], degree: int, rank: int, device: torch.device | str = "cpu"
) -> Shard:
    """The shard of `rank` (of `degree`) of the pack of `sequences`.

    Raises ValueError for what `Borders` refuses and for labels of another length than their tokens.
    """
    lengths = [len(tokens) for tokens, _ in sequences]
    for tokens, own in sequences:
        if own is not None and len(own) != len(tokens):
            raise ValueError(f"a sequence of {len(tokens)} tokens has {len(own)} labels")
    padding = -sum(lengths) % degree
    borders = Borders([*lengths, padding] if padding else lengths)
    size = borders.tokens // degree
    start, stop = rank * size, (rank + 1) * size

    def cut(pieces: list[np.ndarray], fill: int) -> torch.Tensor:
        if padding:
            pieces = [*pieces, np.full(padding, fill, np.int64)]
        return torch.from_numpy(np.concatenate(pieces)[start:stop].astype(np.int64)).to(device)

    labels = cut([shift(tokens if own is None else own) for tokens, own in sequences], IGNORE)
    return Shard(
        input_ids=cut([tokens for tokens, _ in sequences], 0)[None],
        position_ids=cut([np.arange(n) for n in lengths], 0)[None],
        labels=labels,
        label_tokens=int((labels != IGNORE).sum()),
        borders=borders,
    )


def shift(labels: np.ndarray) -> np.ndarray:
    """Labels [S] of one sequence moved one to the left: position i predicts token i + 1."""
    return np.append(labels[1:].astype(np.int64), IGNORE)
