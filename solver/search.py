"""Search over configurations: which groups each micro-step has, decoded greedily, annealed.

A good configuration is found in tens of milliseconds, because the greedy decoder (kernels.decode)
needs only the groups' numbers and a target time for each micro-step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from flexray.solver import kernels
from flexray.solver.assemble import Draft
from flexray.solver.plan import Plan
from flexray.solver.problem import Floats, Ints, Problem


@dataclass(frozen=True)
class Configuration:
    """Groups of each option in each micro-step, (M, J), and target ms of each, (M,)."""

    counts: Ints
    targets: Floats


@dataclass(frozen=True)
class Found:
    """A decoded configuration.

    Attributes:
        ms: time of the step.
        assignment: group of each sequence in the order of `kernels.layout`, (K,).
        tried: places tried to find it: the effort.
    """

    ms: float
    configuration: Configuration
    assignment: Ints
    tried: int


def anneal(
    problem: Problem,
    start: Configuration,
    evaluations: int,
    stop_at: float = 0.0,
    heat: float = 0.01,
    seed: int = 0,
) -> Found:
    """The best configuration seen from `start` on; with 1 evaluation that is `start`, decoded.

    Deterministic: effort is counted in places tried. `ms` is inf if nothing could be decoded.
    """
    M, J = start.counts.shape
    most = max(M + 4, 2 * M) if evaluations > 1 else M
    counts = np.zeros((most, J), np.int64)
    counts[:M] = start.counts
    targets = np.zeros(most)
    targets[:M] = start.targets
    assignment = np.zeros(len(problem.lengths), np.int64)
    ms, M, tried = kernels.anneal(
        problem.lengths,
        problem.time,
        problem.work,
        problem.capacity,
        problem.fixed,
        problem.micro_step_ms,
        problem.monotone,
        problem.degrees,
        problem.machine,
        counts,
        targets,
        M,
        evaluations,
        float(stop_at),
        heat,
        seed,
        assignment,
    )
    return Found(float(ms), Configuration(counts[:M], targets[:M]), assignment, int(tried))


def polish(problem: Problem, found: Found, moves: int, heat: float, seed: int = 0) -> Found:
    """The same groups with sequences exchanged between them; never worse."""
    assignment = found.assignment.copy()
    ms = kernels.polish(
        problem.lengths,
        problem.time,
        problem.capacity,
        problem.fixed,
        problem.micro_step_ms,
        problem.machine,
        problem.degrees,
        found.configuration.counts,
        assignment,
        moves,
        heat,
        seed,
    )
    return Found(float(ms), found.configuration, assignment, found.tried + moves)


# Sequences x micro-steps beyond which one decoding alone takes a second.
PACK_ONLY = 20_000_000
# Of each round of the search: configurations kept, share of the effort, heat of the annealing,
# places tried that a move of the polish counts as on up to 64 GPUs, heat of the polish.
ROUNDS = ((8, 0.3, 0.003, 200, 1e-4), (3, 0.3, 0.003, 200, 1e-4), (1, 0.4, 0.0015, 20, 1e-3))


def search(
    problem: Problem, starts: Sequence[Configuration], evaluations: int, stop_at: float = 0.0
) -> Found:
    """The best that rounds of annealing and polishing find; fewer and fewer starts are kept.

    Where the longest sequences go decides much and an annealing rarely changes it, so several
    different starts are worth more than one long annealing.
    """
    pool = [anneal(problem, start, 1) for start in starts]
    for n, (width, share, heat, places, polish_heat) in enumerate(ROUNDS):
        pool = sorted(pool, key=lambda found: found.ms)[:width]
        each = int(evaluations * share / len(pool))
        for i, found in enumerate(pool):
            better = anneal(problem, found.configuration, each, stop_at, heat, 10 * n + i)
            if math.isfinite(better.ms):
                moves = each // (places * max(1, problem.cluster.gpus // 64))
                better = polish(problem, better, moves, polish_heat, 10 * n + i)
            pool[i] = min(found, better, key=lambda found: found.ms)
            if pool[i].ms <= stop_at:
                return pool[i]
    return min(pool, key=lambda found: found.ms)


def greedy(problem: Problem, evaluations: int) -> list[Found]:
    """Plain configurations, best first, or as many of them as `evaluations` allow.

    One large group for the longest sequence in one micro-step, small groups everywhere else; the
    best for each large group and number of micro-steps.
    """
    best: dict[tuple[int, int], Found] = {}
    tried = 0
    for start in _starts(problem):
        found = anneal(problem, start, 1)
        tried += found.tried
        kind = (len(start.targets), int(np.flatnonzero(start.counts[0])[-1]))
        if kind not in best or found.ms < best[kind].ms:
            best[kind] = found
        if tried > evaluations:
            break
    return sorted(best.values(), key=lambda found: found.ms)


def like(problem: Problem, plan: Plan) -> Configuration:
    """The configuration of a plan of this problem."""
    counts = np.zeros((len(plan.micro_steps), len(problem.options)), np.int64)
    for m, step in enumerate(plan.micro_steps):
        for group in step.groups:
            counts[m, np.searchsorted(problem.degrees, group.degree)] += 1
    targets = np.array([m.planned_ms - problem.micro_step_ms for m in plan.micro_steps])
    return Configuration(counts, targets)


def _starts(problem: Problem) -> Iterator[Configuration]:
    J = len(problem.options)
    work = problem.work.min(axis=1).sum() / problem.power
    for M in range(problem.fewest_micro_steps, problem.fewest_micro_steps + 2):
        for big in np.flatnonzero(np.isfinite(problem.time[0])).tolist():
            longest = problem.time[0, big]
            for small in range(J):
                if problem.degrees[small] > 8 and problem.degrees[small] > problem.degrees[0]:
                    continue
                counts = np.zeros((M, J), np.int64)
                counts[:] = _filled(problem, [], small)
                counts[0] = _filled(problem, [big], small)
                rest = max(0.0, (work * 1.05 - longest) / max(1, M - 1))
                targets = np.full(M, rest)
                targets[0] = longest
                yield Configuration(counts, targets)


def _filled(problem: Problem, groups: list[int], small: int) -> Ints:
    """Counts of a micro-step with `groups` (options) and else the largest up to `small`, (J,)."""
    counts = np.bincount(np.array(groups, np.int64), minlength=len(problem.options))
    idle = problem.cluster.gpus - int(counts @ problem.degrees)
    for j in range(small, -1, -1):
        more = int(idle // problem.degrees[j])
        counts[j] += more
        while more and not problem.has_room(counts):
            counts[j] -= 1
            more -= 1
        idle -= more * int(problem.degrees[j])
    return counts


def drafts(problem: Problem, found: Found) -> list[list[Draft]]:
    """The groups of a decoded configuration, micro-step by micro-step, placed on ranks."""
    counts = found.configuration.counts
    members: dict[int, list[int]] = {}
    for k, g in enumerate(found.assignment):
        members.setdefault(int(g), []).append(k)
    steps: list[list[Draft]] = [[] for _ in counts]
    g = 0
    for j in range(counts.shape[1]):
        for m in range(counts.shape[0]):
            for _ in range(counts[m, j]):
                steps[m].append(Draft(j, members.get(g, ())))
                g += 1
    for step in steps:
        # The kernel's order: options descend, later groups first.
        step.reverse()
        places = problem.place([int(problem.degrees[d.option]) for d in step])
        assert places is not None
        step[:] = [d._replace(ranks=ranks) for d, ranks in zip(step, places, strict=True)]
    return steps
