"""Who is in the world: a state machine that knows neither Ray nor torch.

Facts go in: an actor has started or is lost, nodes drain, another size is wanted. What comes out is
who ought to be in the next generation, why, and which host copies its training state comes from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from flexray.actors.seat import Copies, Holding

Change = Literal["scale", "drain"]


class Membership:
    """The actors that live, and those of them that form the present generation.

    Attributes:
        target: how many members are wanted.
        least: with how many the run goes on; below that it waits.
        members: of the present generation, in rank order; those that were lost are not in it.
    """

    def __init__(self, target: int, least: int, *, shard_size: int | None = None) -> None:
        """Worlds are multiples of `shard_size`."""
        self.target, self.least = target, least
        self.members: tuple[int, ...] = ()
        self._unit = shard_size or 1
        self._places: dict[int, tuple[str, str]] = {}
        self._draining: frozenset[str] = frozenset()

    @property
    def alive(self) -> tuple[int, ...]:
        """Actors that have started and are not lost."""
        return tuple(self._places)

    def started(self, actor: int, node: str, gpu: str) -> None:
        """An actor may join the next generation."""
        self._places[actor] = (node, gpu)

    def lost(self, actor: int) -> None:
        """An actor is dead, or is to be treated so."""
        self._places.pop(actor, None)
        self.members = tuple(a for a in self.members if a != actor)

    def drain(self, nodes: Iterable[str]) -> None:
        """These nodes, and no others, are about to go."""
        self._draining = frozenset(nodes)

    def formed(self, members: Sequence[int]) -> None:
        """A generation of `members`, in rank order, is there."""
        self.members = tuple(members)

    def stays(self, actor: int) -> bool:
        """Whether the node of a living actor is not about to go."""
        return self._places[actor][0] not in self._draining

    def wanted(self) -> tuple[int, ...]:
        """Who ought to be in the world, in rank order: node by node. None while there are too few.

        Nobody on a node that drains, unless too few are left without. Members stay before others
        come in, and full nodes before others.
        """
        staying = [actor for actor in self._places if self.stays(actor)]
        for actors in (staying, list(self._places)):
            size = min(len(actors), self.target) // self._unit * self._unit
            if size >= max(self.least, 1):
                break
        else:
            return ()
        neighbours = Counter(self._places[actor][0] for actor in actors if actor in self.members)
        actors.sort(
            key=lambda a: (
                not self.stays(a),
                a not in self.members,
                -neighbours[self._places[a][0]],
                self._order(a),
            )
        )
        return tuple(sorted(actors[:size], key=self._order))

    @property
    def change(self) -> Change | None:
        """Why the present generation ought to make way for another one, if it ought to."""
        wanted = self.wanted()
        if not wanted or set(wanted) == set(self.members):
            return None
        leaving = set(self.members) - set(wanted)
        return "drain" if any(not self.stays(actor) for actor in leaving) else "scale"

    def _order(self, actor: int) -> tuple[str, int, str, int]:
        node, gpu = self._places[actor]
        return node, len(gpu), gpu, actor  # GPU 2 before 10


def newest_copies(
    holdings: Mapping[int, Iterable[Holding]],
    owners: Mapping[int, int],
    participants: Sequence[int],
) -> Copies | None:
    """The newest state that host copies cover; None when some owner's copies are all lost.

    Args:
        holdings: whole copies by actor.
        owners: by generation, into how many shards its state was cut.
        participants: of the generation that is to start from them, in order.
    """
    holders: dict[tuple[int, int], dict[int, list[int]]] = {}
    updates = {}
    for number, actor in enumerate(participants):
        for held in holdings.get(actor, ()):
            state = (held.generation, held.step)
            holders.setdefault(state, {}).setdefault(held.owner, []).append(number)
            updates[state] = held.updates
    whole = [state for state, by_owner in holders.items() if len(by_owner) == owners[state[0]]]
    if not whole:
        return None
    generation, step = newest = max(whole)
    return Copies(
        generation,
        step,
        owners[generation],
        updates[newest],
        tuple(tuple(holders[newest][owner]) for owner in range(owners[generation])),
    )


def buddy_shift(nodes: Sequence[str]) -> int:
    """How far from a rank its buddy is: on another node for as many as can be.

    `nodes`: of the ranks, in rank order, node by node.
    """
    largest = max(Counter(nodes).values())
    if largest == len(nodes):
        return 1
    return largest if 2 * largest <= len(nodes) else len(nodes) // 2
