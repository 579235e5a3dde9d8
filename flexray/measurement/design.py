"""Which steps are run: few long and many short rows, on every degree, one micro-step and several.

A row is its length (datasets/random_rows.py), so a case needs no data. All ranks are busy alike in
every micro-step: ranks may share cores or a network.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flexray.solver.cluster import Cluster
from flexray.solver.plan import Group, MicroStep, Plan

Ranks = tuple[int, ...]

SHORT = 32  # tokens of a short row: so few that attention within it costs nothing
MANY = 64  # short rows on a rank at most: where a row costs much, they would take for ever


@dataclass(frozen=True)
class Pack:
    """What each rank of a micro-step holds: `tokens`, in rows of up to `length` tokens."""

    tokens: int
    length: int

    def lengths(self, degree: int) -> tuple[int, ...]:
        """The rows of a group of `degree`: equally long to within one token."""
        total = self.tokens * degree
        rows = -(-total // self.length)
        return tuple(total // rows + (i < total % rows) for i in range(rows))


@dataclass(frozen=True)
class Case:
    """One step. Rows of the plan's groups are positions in `lengths`."""

    plan: Plan
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, packs: Sequence[Pack], groups: Sequence[Ranks]) -> Case:
        """A micro-step for each of `packs`, in each of which every group works on such a pack."""
        lengths: list[int] = []
        micro_steps = []
        for pack in packs:
            made = []
            for ranks in groups:
                rows = pack.lengths(len(ranks))
                first = len(lengths)
                lengths += rows
                made.append(Group(len(ranks), ranks, tuple(range(first, len(lengths))), rows, 0.0))
            micro_steps.append(MicroStep(tuple(made), 0.0))
        plan = Plan(tuple(micro_steps), 0.0, 0.0, solve_s=0.0, method="profile")
        return cls(plan, tuple(lengths))

    @property
    def label_tokens(self) -> int:
        """Every token but the first of each row."""
        return sum(self.lengths) - len(self.lengths)


def inside(cluster: Cluster, degree: int) -> list[Ranks]:
    """Groups of `degree` as plans have them, in one node where one is large enough.

    Ranks that are left over are groups of one.
    """
    whole = [tuple(range(cluster.gpus))] if degree > cluster.largest_node else _nodes(cluster)
    return [group for ranks in whole for group in _chunks(ranks, degree)]


def across(cluster: Cluster, degree: int) -> list[Ranks]:
    """Groups that span nodes although one node has room for them; none without two nodes.

    Ranks that are left over are groups of one.
    """
    if degree == 1 or degree > cluster.largest_node or len(cluster.node_sizes) == 1:
        return []
    nodes = _nodes(cluster)
    # The first rank of every node, then the second of every node ...
    order = [n[i] for i in range(cluster.largest_node) for n in nodes if i < len(n)]
    groups: list[Ranks] = []
    for ranks in _chunks(tuple(order), degree):
        if len({cluster.node_of[r] for r in ranks}) > 1:
            groups.append(tuple(sorted(ranks)))
        else:
            groups += [(r,) for r in ranks]
    return groups


def one_round(cluster: Cluster, degrees: Sequence[int], tokens: int, longest: int) -> list[Case]:
    """Steps that together tell all coefficients apart; `tokens` on a rank at most.

    One long row against many short ones tells attention from the rest, and what a row costs; a
    quarter of the tokens tells what does not depend on them, and that in one micro-step and in
    several what a micro-step and a step cost. (Next to no tokens would tell what the model has no
    term for: what starting every operation costs.)
    """
    short = max(SHORT, tokens // MANY)
    long, few = Pack(tokens, longest), Pack(max(1, tokens // 4), longest)
    many, between = Pack(tokens, short), Pack(max(1, tokens // 2), round((short * longest) ** 0.5))
    alone = inside(cluster, 1)
    return [
        *(Case.of([few] * micro_steps, alone) for micro_steps in (1, 4)),
        *(
            Case.of(packs, inside(cluster, degree))
            for packs in ([long], [many, few, between])
            for degree in degrees
        ),
    ]


def across_round(cluster: Cluster, degrees: Sequence[int], tokens: int, longest: int) -> list[Case]:
    """What tells the all-to-all across nodes of degrees that a node has room for."""
    packs = [Pack(tokens, longest), Pack(max(1, tokens // 4), longest)]
    return [Case.of(packs, groups) for d in degrees if (groups := across(cluster, d))]


def ramp(cluster: Cluster, most: int, longest: int) -> Iterator[tuple[int, Case]]:
    """Ever more tokens on every rank by itself, up to `most`, and what they are."""
    tokens = min(SHORT, most)
    while tokens <= most:
        yield tokens, Case.of([Pack(tokens, longest)], inside(cluster, 1))
        tokens *= 2


def _nodes(cluster: Cluster) -> list[Ranks]:
    nodes: list[list[int]] = [[] for _ in cluster.node_sizes]
    for rank, node in enumerate(cluster.node_of):
        nodes[node].append(rank)
    return [tuple(ranks) for ranks in nodes]


def _chunks(ranks: Ranks, degree: int) -> list[Ranks]:
    whole = len(ranks) // degree * degree
    chunks = [ranks[i : i + degree] for i in range(0, whole, degree)]
    return chunks + [(rank,) for rank in ranks[whole:]]
