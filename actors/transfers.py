"""Who sends which part of the training state to whom when the owners of parameters change.

A pure function of the old and the new layout and of who holds which copy: every participant
computes the same transfers, and nothing about them is ever sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from flexray.actors.host_copy import KINDS, Layout


class Transfer(NamedTuple):
    """Elements start..stop of a flattened whole parameter, and the same ones of its moments."""

    round: int  # the messages of a round are on their way at once
    entry: int  # index into the layout's entries
    owner: int  # of the copy that they are in
    sender: int  # a participant; the receiver itself where it has the copy
    receiver: int
    start: int
    stop: int


class _Staging:
    """The buffer that a participant sends from, or receives into, and its bytes in a round."""

    __slots__ = ("round", "used")

    def __init__(self) -> None:
        self.round = self.used = 0

    def advance(self, to: int) -> None:
        if to > self.round:
            self.round, self.used = to, 0


def transfers(
    old: Layout, new: Layout, world: int, holders: Sequence[Sequence[int]], limit: int
) -> Iterator[Transfer]:
    """All that gives every rank of the new world its rows: rank r has those of owner r % owners.

    holders: by owner of `old`, the participants that have its copy. Of those that have what a
    receiver lacks, the one that has sent least sends it.
    limit: bytes, of an element and its moments at least, that a participant sends in a round, and
    that it receives. Rounds never decrease along what one participant sends, or receives.
    Raises ValueError when nobody holds what is needed.
    """
    participants = 1 + max([world - 1, *(p for own in holders for p in own)])
    load = [0] * participants
    sent = [_Staging() for _ in range(participants)]
    received = [_Staging() for _ in range(participants)]
    for number, entry in enumerate(old.entries):
        width = entry.row_elements
        size = len(KINDS) * entry.dtype.itemsize
        ends = [old.rows(entry, owner)[1] for owner in range(old.owners)]
        for receiver in range(world):
            row, end = new.rows(entry, receiver % new.owners)
            while row < end and width:
                owner = row // ends[0]
                first, row = row, min(ends[owner], end)
                start, stop = first * width, row * width
                if receiver in holders[owner]:
                    yield Transfer(0, number, owner, receiver, receiver, start, stop)
                    continue
                if not holders[owner]:
                    raise ValueError(f"nobody has the copy of owner {owner}: {entry.name}")
                sender = min(holders[owner], key=lambda p: (load[p], p))
                load[sender] += (stop - start) * size
                outgoing, incoming = sent[sender], received[receiver]
                now = max(outgoing.round, incoming.round)
                while start < stop:
                    outgoing.advance(now)
                    incoming.advance(now)
                    room = limit - max(outgoing.used, incoming.used)
                    part = min(room // size, stop - start)
                    if part:
                        yield Transfer(now, number, owner, sender, receiver, start, start + part)
                    outgoing.used += part * size
                    incoming.used += part * size
                    start += part
                    now += 1


def appointed(holders: Sequence[Sequence[int]]) -> list[int]:
    """One holder for every owner's copy, the copies spread evenly over the participants.

    Raises ValueError where there is none.
    """
    count: dict[int, int] = {}
    chosen = []
    for owner, own in enumerate(holders):
        if not own:
            raise ValueError(f"nobody has the copy of owner {owner}")
        holder = min(own, key=lambda p: (count.get(p, 0), p))
        count[holder] = count.get(holder, 0) + 1
        chosen.append(holder)
    return chosen
