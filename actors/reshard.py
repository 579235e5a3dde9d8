"""Moves the training state from host copies of an older generation into the tensors of a new one.

Every participant reads off the same plan (transfers.py) what it sends and what it gets, a round of
bounded messages at a time: beside its own rows and copies it needs no more than two buffers of
STAGING bytes. Then checksums of the whole parameters show whether all of it arrived as it was.

Usage, on every participant alike (leavers have no tensors):
    tensors = tensors_to_restore(model, optimizer, origin.updates)
    moved = restore(
        copies, tensors, entries_of(model), origin, group=group, rank=rank, world=world, owners=n
    )
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import product
from typing import Any

import torch

from flexray.actors.checksum import checksum
from flexray.actors.host_copy import KINDS, Entry, HostCopy, Kind, Layout
from flexray.actors.seat import Copies
from flexray.actors.transfers import Transfer, appointed, transfers

STAGING = 64 << 20  # bytes

Tensors = Mapping[tuple[str, Kind], torch.Tensor]
Parts = dict[int, list[torch.Tensor]]  # of a message to or from each participant, as bytes


class CorruptState(RuntimeError):
    """The state after a re-shard is not the one before: one line that names the parameter."""


@dataclass(frozen=True)
class Moved:
    """What a re-shard took on one participant."""

    sent: int  # bytes
    received: int
    local: int  # bytes that came from its own copies
    seconds: float


def restore(
    copies: Mapping[int, HostCopy],
    tensors: Tensors,
    entries: Sequence[Entry],
    origin: Copies,
    *,
    group: Any,
    rank: int,
    world: int,
    owners: int,
    timeout_s: float = 300.0,
    staging: int = STAGING,
) -> Moved:
    """Fills `tensors` with this rank's rows of the state that `origin` names; a collective call.

    copies: by owner, those of `origin` that this participant has.
    tensors: this rank's rows of all trained state, flat; a leaver has none.
    group: a gloo group of all participants, by their numbers.
    owners: of the new world, whose rank r has the rows of owner r % owners.
    timeout_s: of the wait for a message.
    Raises CorruptState, on all participants, when checksums of a parameter differ; ValueError when
    nobody holds some of the state; and what the group raises when a participant dies.
    """
    started = time.perf_counter()
    entries = tuple(entries)
    state = _State(copies, Layout(entries, origin.owners), tensors, Layout(entries, owners), rank)
    rounds: dict[int, list[Transfer]] = defaultdict(list)
    for transfer in transfers(state.old, state.new, world, origin.holders, staging):
        if rank in (transfer.sender, transfer.receiver):
            rounds[transfer.round].append(transfer)
    pinned = any(tensor.is_cuda for tensor in tensors.values())
    buffers = [torch.empty(staging, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
    sent = received = local = 0
    for number in sorted(rounds):
        outgoing: Parts = defaultdict(list)
        incoming: Parts = defaultdict(list)
        for transfer in rounds[number]:
            if transfer.sender == transfer.receiver:
                for here, there in zip(state.copied(transfer), state.live(transfer), strict=True):
                    there.copy_(here)
                    local += len(here)
            elif transfer.sender == rank:
                outgoing[transfer.receiver] += state.copied(transfer)
            else:
                incoming[transfer.sender] += state.live(transfer)
        sent += sum(len(part) for parts in outgoing.values() for part in parts)
        received += sum(len(part) for parts in incoming.values() for part in parts)
        _exchange(outgoing, incoming, buffers, group, number, timedelta(seconds=timeout_s))
    difference = state.surplus(origin.holders, replicas=world // owners)
    group.allreduce([difference]).wait()
    wrong = difference.nonzero().tolist()
    if wrong:
        entry, kind = wrong[0]
        raise CorruptState(
            f"step {origin.step}: {entries[entry].name} ({KINDS[kind]}) after the re-shard is not "
            "what the host copies have: memory or network of a node corrupts data"
        )
    return Moved(sent, received, local, time.perf_counter() - started)


@dataclass(frozen=True)
class _State:
    """The training state on one participant: as copies of old owners, and live."""

    copies: Mapping[int, HostCopy]
    old: Layout
    tensors: Tensors
    new: Layout
    rank: int

    def copied(self, transfer: Transfer) -> list[torch.Tensor]:
        """What a transfer takes out of a copy: the bytes of every kind."""
        entry = self.old.entries[transfer.entry]
        first, end = self.old.rows(entry, transfer.owner)
        copy = self.copies[transfer.owner]
        return [
            _cut(copy.view(entry.name, kind, first, end), first * entry.row_elements, transfer)
            for kind in KINDS
        ]

    def live(self, transfer: Transfer) -> list[torch.Tensor]:
        """Where a transfer's bytes of every kind belong."""
        entry = self.new.entries[transfer.entry]
        first = self._first_element(entry)
        return [_cut(self.tensors[entry.name, kind], first, transfer) for kind in KINDS]

    def surplus(self, holders: Sequence[Sequence[int]], replicas: int) -> torch.Tensor:
        """Checksums of what is live here, less those of the copies that are checked here.

        [entries, kinds]. Their sum over all participants is zero when all state is what it was.
        """
        entries = self.old.entries
        surplus = torch.zeros(len(entries), len(KINDS), dtype=torch.int64)
        for owner, holder in enumerate(appointed(holders)):
            if holder != self.rank:
                continue
            for (i, entry), (j, kind) in product(enumerate(entries), enumerate(KINDS)):
                first, end = self.old.rows(entry, owner)
                part = self.copies[owner].view(entry.name, kind, first, end)
                surplus[i, j] -= replicas * checksum(part, first * entry.row_elements)
        if self.tensors:
            found = [
                checksum(self.tensors[entry.name, kind], self._first_element(entry))
                for entry, kind in product(entries, KINDS)
            ]
            surplus += torch.stack(found).cpu().view_as(surplus)
        return surplus

    def _first_element(self, entry: Entry) -> int:
        """Of this rank's part of the flattened whole parameter."""
        return self.new.rows(entry, self.rank % self.new.owners)[0] * entry.row_elements


def _cut(part: torch.Tensor, first: int, transfer: Transfer) -> torch.Tensor:
    """The bytes of a transfer in a part that begins with element `first` of the parameter."""
    return part[transfer.start - first : transfer.stop - first].view(torch.uint8)


def _exchange(
    outgoing: Parts,
    incoming: Parts,
    buffers: Sequence[torch.Tensor],
    group: Any,
    tag: int,
    timeout: timedelta,
) -> None:
    """One message to and one from every peer, by way of the buffers."""
    send_buffer, receive_buffer = buffers
    receiving = []
    for peer, message in _messages(incoming, receive_buffer):
        receiving.append((group.recv([message], peer, tag), message, incoming[peer]))
    sending = []
    for peer, message in _messages(outgoing, send_buffer):
        torch.cat(outgoing[peer], out=message)
        sending.append(group.send([message], peer, tag))
    for work, message, parts in receiving:
        work.wait(timeout)
        for part, bytes_ in zip(parts, message.split([len(part) for part in parts]), strict=True):
            part.copy_(bytes_)
    for work in sending:
        work.wait(timeout)


def _messages(parts: Parts, buffer: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """A stretch of the buffer for the message of each peer."""
    start = 0
    for peer, message in parts.items():
        size = sum(len(part) for part in message)
        yield peer, buffer[start : start + size]
        start += size
