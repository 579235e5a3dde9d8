"""From an assignment of sequences to a `Plan`: ranks, true times, order."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from flexray.solver.cost import Option
from flexray.solver.plan import Group, MicroStep, Plan
from flexray.solver.problem import Ints, Problem


class Draft(NamedTuple):
    """A group before it is a `Group`.

    An option's index, its sequences as indices into `problem.lengths`, and ranks that it may have.
    """

    option: int
    members: Sequence[int] | Ints
    ranks: tuple[int, ...] | None = None


def assemble(
    problem: Problem,
    steps: Sequence[Sequence[Draft]],
    lower_bound_ms: float,
    method: str,
    cached: Collection[tuple[int, ...]] = (),
) -> Plan | None:
    """The plan of these groups, without the empty ones; None if one micro-step can't be placed."""
    micro_steps = []
    for drafts in steps:
        drafts = sorted((d for d in drafts if len(d.members)), key=lambda d: -d.option)
        if not drafts:
            continue
        places = _places(problem, drafts, cached)
        if not places:
            return None
        groups = [_group(problem, d, ranks) for d, ranks in zip(drafts, places, strict=True)]
        groups.sort(key=lambda g: (-g.degree, g.ranks))
        slowest = max(g.planned_ms for g in groups)
        micro_steps.append(MicroStep(tuple(groups), slowest + problem.micro_step_ms))
    micro_steps.sort(key=lambda m: -m.planned_ms)
    planned = math.fsum(m.planned_ms for m in micro_steps)
    return Plan(
        tuple(micro_steps),
        planned,
        min(lower_bound_ms, planned),
        solve_s=0.0,
        method=method,
        dropped=problem.dropped,
    )


def _places(
    problem: Problem, drafts: Sequence[Draft], cached: Collection[tuple[int, ...]]
) -> list[tuple[int, ...]]:
    decided = [d.ranks for d in drafts if d.ranks is not None]
    if decided and len(set(problem.cluster.speed)) > 1:
        return decided
    return problem.place([problem.options[d.option].degree for d in drafts], cached) or decided


def _group(problem: Problem, draft: Draft, ranks: tuple[int, ...]) -> Group:
    members = np.array(draft.members, np.int64)
    members = members[np.argsort(problem.rows[members])]
    lengths = tuple(problem.lengths[members].tolist())
    option = problem.options[draft.option]
    speed = min(problem.cluster.speed[r] for r in ranks)
    return Group(
        option.degree,
        ranks,
        tuple(problem.rows[members].tolist()),
        lengths,
        group_ms(option, lengths) / speed,
    )


def group_ms(option: Option, lengths: Sequence[int]) -> float:
    """Time of a group on ranks of speed 1."""
    return (
        option.fixed
        + option.quadratic * math.fsum(s * s for s in lengths)
        + option.linear * sum(lengths)
        + option.per_sequence * len(lengths)
    )
