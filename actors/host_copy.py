"""The training state of one owner in host memory: rows of trained parameters and AdamW's moments.

Where which row lies is a pure function of the model's parameters and the number of owners, so that
every rank knows the layout of every copy and none is ever sent. Frozen parameters are not in it.

Usage:
    layout = Layout(entries_of(model), owners)
    copy = HostCopy(layout, owner)
    copy.take(live_tensors(model, optimizer), Tag(generation, step, updates))
    rows = copy.view("lm_head.weight", "exp_avg", start, stop)   # flat, of these rows of the whole
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import nn

from flexray.actors.optimizer import make_state
from flexray.actors.seat import Holding
from flexray.actors.sharding import chunk, own_rows

Kind = Literal["parameter", "exp_avg", "exp_avg_sq"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Entry:
    """A trained parameter; its shape is that of the whole. A scalar is one row."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def rows(self) -> int:
        """Entries of dim 0."""
        return self.shape[0] if self.shape else 1

    @property
    def row_elements(self) -> int:
        """Elements of one row."""
        return math.prod(self.shape[1:])


@dataclass(frozen=True)
class Layout:
    """What the copies of a world with `owners` parameter shards hold, and where."""

    entries: tuple[Entry, ...]
    owners: int

    def rows(self, entry: Entry, owner: int) -> tuple[int, int]:
        """The rows of the whole parameter that `owner` holds: start, stop."""
        return chunk(entry.rows, self.owners, owner)

    def offsets(self, owner: int) -> dict[tuple[str, Kind], int]:
        """Where each part of `owner`'s copy begins in the buffer of its dtype, in elements."""
        ends: dict[torch.dtype, int] = defaultdict(int)
        offsets: dict[tuple[str, Kind], int] = {}
        for entry in self.entries:
            for kind in KINDS:
                offsets[entry.name, kind] = ends[entry.dtype]
                ends[entry.dtype] += self._part(entry, owner)
        return offsets

    def elements(self, owner: int) -> dict[torch.dtype, int]:
        """Length of `owner`'s buffer of each dtype, in the order of the dtypes' first entries."""
        elements: dict[torch.dtype, int] = defaultdict(int)
        for entry in self.entries:
            elements[entry.dtype] += len(KINDS) * self._part(entry, owner)
        return dict(elements)

    def _part(self, entry: Entry, owner: int) -> int:
        start, stop = self.rows(entry, owner)
        return (stop - start) * entry.row_elements


_TAG_BYTES = 64  # also what buffers are aligned to


def _aligned(size: int) -> int:
    return -(-size // _TAG_BYTES) * _TAG_BYTES


class Tag(NamedTuple):
    """Which state a whole copy is."""

    generation: int
    step: int
    updates: int


class HostCopy:
    """The training state of one owner: one flat buffer per dtype, and a tag that says what it is.

    It keeps nothing of the generation's own: no DTensor, mesh or group.
    """

    def __init__(
        self,
        layout: Layout,
        owner: int,
        *,
        memory: torch.Tensor | None = None,
        pinned: bool = False,
    ) -> None:
        """`memory`: bytes to keep it in, `size` of them; who shares them shares the copy."""
        self.layout, self.owner = layout, owner
        if memory is None:
            # Pages come when they are first written, which is not while a generation is formed.
            memory = torch.empty(self.size(layout, owner), dtype=torch.uint8, pin_memory=pinned)
            memory[:_TAG_BYTES] = 0
        self._tag = memory[:_TAG_BYTES].view(torch.int64)
        self.buffers = {}
        end = _TAG_BYTES
        for dtype, n in layout.elements(owner).items():
            self.buffers[dtype] = memory[end : end + n * dtype.itemsize].view(dtype)
            end += _aligned(n * dtype.itemsize)
        self._entries = {entry.name: entry for entry in layout.entries}
        self._offsets = layout.offsets(owner)

    @staticmethod
    def size(layout: Layout, owner: int) -> int:
        """Bytes of a copy's memory."""
        elements = layout.elements(owner).items()
        return _TAG_BYTES + sum(_aligned(n * dtype.itemsize) for dtype, n in elements)

    @property
    def tag(self) -> Tag | None:
        """Which state it is; None while it is being written."""
        is_whole, *tag = self._tag[:4].tolist()
        return Tag(*tag) if is_whole else None

    @tag.setter
    def tag(self, tag: Tag | None) -> None:
        self._tag[0] = 0
        if tag is not None:
            self._tag[1:4] = torch.tensor(tag)
            self._tag[0] = 1

    @property
    def nbytes(self) -> int:
        """Host memory that it takes."""
        return sum(buffer.nbytes for buffer in self.buffers.values())

    @property
    def holding(self) -> Holding | None:
        """What it is; None while it is being written."""
        if self.tag is None:
            return None
        return Holding(self.tag.generation, self.tag.step, self.owner, self.tag.updates)

    def view(self, name: str, kind: Kind, start: int, stop: int) -> torch.Tensor:
        """Rows start..stop (numbered in the whole parameter) of one part, flat and contiguous.

        Raises IndexError for rows that are not this owner's.
        """
        entry = self._entries[name]
        first, end = self.layout.rows(entry, self.owner)
        if not first <= start <= stop <= end:
            raise IndexError(f"{name}: rows {start}..{stop} are not in {first}..{end}")
        offset = self._offsets[name, kind] + (start - first) * entry.row_elements
        return self.buffers[entry.dtype].narrow(0, offset, (stop - start) * entry.row_elements)

    def take(self, tensors: Mapping[tuple[str, Kind], torch.Tensor | None], tag: Tag) -> None:
        """Copies this rank's `live_tensors` of the copy's own layout; None is all zeros."""
        self.tag = None
        device = torch.device("cpu")
        for (name, kind), tensor in tensors.items():
            place = self.view(name, kind, *self.layout.rows(self._entries[name], self.owner))
            if tensor is None:
                place.zero_()
            else:
                place.copy_(tensor, non_blocking=True)
                device = tensor.device
        if device.type == "cuda":
            # Only then is what the copies read and write as the host believes.
            done = torch.cuda.Event()
            done.record(torch.cuda.current_stream(device))
            done.synchronize()
        self.tag = tag


def entries_of(model: nn.Module) -> tuple[Entry, ...]:
    """The trained parameters of a sharded model, in its order; tied ones once."""
    return tuple(Entry(name, tuple(p.shape), p.dtype) for name, p in _trained(model))


def live_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[tuple[str, Kind], torch.Tensor | None]:
    """This rank's rows of all trained state, each flat, sharing the memory of model and optimizer.

    None for moments that do not exist, since no step has made them yet.
    """
    tensors: dict[tuple[str, Kind], torch.Tensor | None] = {}
    for name, parameter in _trained(model):
        parts: dict[str, torch.Tensor] = {
            "parameter": parameter,
            **optimizer.state.get(parameter, {}),
        }
        for kind in KINDS:
            part = parts.get(kind)
            tensors[name, kind] = None if part is None else own_rows(part.detach()).view(-1)
    return tensors


def tensors_to_restore(
    model: nn.Module, optimizer: torch.optim.Optimizer, updates: int
) -> dict[tuple[str, Kind], torch.Tensor]:
    """As `live_tensors`, to be written: moments are made, as `updates` steps would leave them."""
    for _, parameter in _trained(model):
        make_state(optimizer, parameter, updates)
    return {part: x for part, x in live_tensors(model, optimizer).items() if x is not None}


def _trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)
