"""The joint model of a whole step: how many micro-steps, which groups, which sequences.

Micro-steps are counted by level of time, groups by level and option, sequences by bucket of like
lengths, level and option. Groups of one option are interchangeable, so the model's size does not
grow with the number of GPUs, and the number of micro-steps is the model's own decision:

    minimise   sum_c W_c + micro_step_ms * sum_c y_c
    subject to low_c y_c <= W_c <= high_c y_c                      time of the level's micro-steps
               sum_j degree_j n_cj <= N y_c                        GPUs
               sum_k time_kj x_kcj + fixed_j n_cj <= high_c n_cj   time of the groups
               sum_j work_cj <= N W_c                              work
               sum_j (work_cj - low_c degree_j n_cj) <= N (W_c - low_c y_c)
                                              work, j in some options; work_cj is
                                              degree_j (sum_k time_kj x_kcj + fixed_j n_cj)
               sum_k length_k x_kcj <= capacity_j n_cj             memory
               sum_cj x_kcj = count_k                              every sequence placed
               W_c >= low_c y_c + sum_j (time_kj + fixed_j - low_c) x_kcj
                                              one micro-step lasts as long as each sequence in it

Groups of some options do at most what their GPUs do in low_c and all GPUs in the rest of a
micro-step: McCormick's envelope (1976) of n_cj W_c. `_sets` says which options together.

With levels as intervals, each bucket counted at its shortest length, a top level that no
micro-step of an optimal plan exceeds and enough micro-steps, its dual bound is a bound for the step
(solver/bound.py). With levels as budgets (low = high) and honest bucket lengths its solutions are
configurations for the decoder.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import pulp

from flexray.solver import milp
from flexray.solver.plan import Plan
from flexray.solver.problem import Floats, Ints, Problem
from flexray.solver.search import Configuration

# Most levels of a proposal: a plan of many micro-steps has many of about one time.
LEVELS = 8


@dataclass(frozen=True)
class Buckets:
    """Sequences of like length, longest first, (B,) each.

    `whole` ones hold so few that they are counted in integers.
    """

    length: Floats
    time: Floats  # (B, J), inf where a sequence does not fit
    count: Ints
    whole: Sequence[bool]


class JointModel:
    """The model above, built in PuLP.

    Args:
        power: GPU ms of work in a ms of a micro-step.
        speed: of the fastest rank: what a group's time is divided by at best.
        most: micro-steps allowed in a level.
        whole_from: groups of at least this degree are counted in integers, others are relaxed.
    """

    def __init__(
        self,
        problem: Problem,
        buckets: Buckets,
        low: Floats,
        high: Floats,
        most: int,
        whole_from: int,
    ) -> None:
        self.model = pulp.LpProblem("joint", pulp.LpMinimize)
        B, J, C = len(buckets.length), len(problem.options), len(high)
        N, degree = problem.cluster.gpus, problem.degrees
        speed = max(problem.cluster.speed)
        self.y = [pulp.LpVariable(f"y{c}", 0, most, pulp.LpInteger) for c in range(C)]
        W = [pulp.LpVariable(f"W{c}", 0) for c in range(C)]
        kind = [pulp.LpInteger if d >= whole_from else pulp.LpContinuous for d in degree]
        self.n = [
            [pulp.LpVariable(f"n{c}_{j}", 0, None, kind[j]) for j in range(J)] for c in range(C)
        ]
        self.model += pulp.lpSum(W) + problem.micro_step_ms * pulp.lpSum(self.y)
        placed: list[list[pulp.LpVariable]] = [[] for _ in range(B)]
        for c in range(C):
            y, n = self.y[c], self.n[c]
            if low[c] == high[c]:
                self.model += W[c] == float(high[c]) * y
            else:
                self.model += W[c] >= float(low[c]) * y
                self.model += W[c] <= float(high[c]) * y
            self.model += (
                pulp.LpAffineExpression([*zip(n, map(int, degree), strict=True), (y, -N)]) <= 0
            )
            work: list[list[tuple[pulp.LpVariable, float]]] = []
            holds: dict[int, list[tuple[pulp.LpVariable, float]]] = {}
            for j in range(J):
                # On the fastest ranks a group does `speed` times the work in the same time.
                time = [(n[j], float(problem.fixed[j] - high[c] * speed))]
                memory = [(n[j], -float(problem.capacity[j]))]
                work.append([(n[j], float(problem.fixed[j] * degree[j]))])
                for k in range(B):
                    t = buckets.time[k, j]
                    if t + problem.fixed[j] > high[c] * speed:
                        continue
                    x = pulp.LpVariable(
                        f"x{k}_{c}_{j}",
                        0,
                        int(buckets.count[k]),
                        pulp.LpInteger if buckets.whole[k] else pulp.LpContinuous,
                    )
                    placed[k].append(x)
                    least = float((t + problem.fixed[j]) / speed - low[c])
                    if buckets.count[k] == 1 and least > 0:
                        holds.setdefault(k, []).append((x, -least))
                    time.append((x, float(t)))
                    memory.append((x, float(buckets.length[k])))
                    work[j].append((x, float(t * degree[j])))
                self.model += pulp.LpAffineExpression(time) <= 0
                self.model += pulp.LpAffineExpression(memory) <= 0
            everything = [(W[c], -problem.power), *chain(*work)]
            self.model += pulp.LpAffineExpression(everything) <= 0
            rest = (W[c], -problem.power), (y, float(problem.power * low[c]))
            for first, last in _sets(J) if low[c] < high[c] else ():
                gpus = ((n[j], -float(low[c] * speed * degree[j])) for j in range(first, last))
                terms = [*rest, *gpus, *chain(*work[first:last])]
                self.model += pulp.lpSum(x * factor for x, factor in terms) <= 0
            for terms in holds.values():
                terms += [(W[c], 1.0), (y, -float(low[c]))]
                self.model += pulp.LpAffineExpression(terms) >= 0
        for k in range(B):
            self.model += pulp.lpSum(placed[k]) == int(buckets.count[k])

    def solve(
        self, nodes: int, guard_s: float, gap: float, cpu_s: float = math.inf
    ) -> milp.Outcome:
        """Runs HiGHS; the variables then hold its best solution."""
        return milp.minimise(self.model, nodes, guard_s, gap, cpu_s)


def _sets(options: int) -> list[tuple[int, int]]:
    """Ranges (first, last + 1) of options: each one, the smallest ones, the largest ones."""
    each = [(j, j + 1) for j in range(options)]
    smallest = [(0, j) for j in range(2, options + 1)]
    largest = [(j, options) for j in range(1, options - 1)]
    return each + smallest + largest


def bucketed(problem: Problem, alone: int, most: int, shortest: bool) -> Buckets:
    """The longest `alone` sequences one by one, the others in up to `most` buckets.

    Args:
        shortest: count a bucket at its shortest length, else at its mean.
    """
    K = len(problem.lengths)
    alone = min(alone, K)
    starts = np.array([*range(alone), *_cuts(problem.lengths, alone, most)], np.int64)
    ends = np.append(starts[1:], K)
    count = ends - starts
    if shortest:
        length, time = problem.lengths[ends - 1].astype(np.float64), problem.time[ends - 1]
    else:
        length = np.add.reduceat(problem.lengths.astype(np.float64), starts) / count
        time = np.add.reduceat(problem.time, starts, axis=0) / count[:, None]
    return Buckets(length, time, count, [bool(c == 1) for c in count])


def _cuts(lengths: Ints, first: int, most: int) -> list[int]:
    """Where up to `most` buckets of descending `lengths[first:]` start.

    Each time the cut that saves most tokens of rounding down to a bucket's shortest length.
    """
    if first == len(lengths):
        return []
    heap: list[tuple[int, int, int, int]] = []  # -saved by its best cut, start, cut, end

    def push(start: int, end: int) -> None:
        saved = np.arange(1, end - start + 1) * (lengths[start:end] - lengths[end - 1])
        best = int(np.argmax(saved))
        heapq.heappush(heap, (-int(saved[best]), start, start + best + 1, end))

    push(first, len(lengths))
    while len(heap) < most and heap[0][0] < 0:
        _, start, cut, end = heapq.heappop(heap)
        push(start, cut)
        push(cut, end)
    return sorted(start for _, start, _, _ in heap)


def propose(problem: Problem, plan: Plan, nodes: int, guard_s: float) -> Configuration | None:
    """A configuration from the joint model with budgets around the micro-steps of `plan`.

    None if none was found within `nodes` and `guard_s`.
    """
    made = np.array([m.planned_ms - problem.micro_step_ms for m in plan.micro_steps])
    picked = np.linspace(0, len(made) - 1, min(len(made), LEVELS)).astype(int)
    # Rounded up, so that what the plan holds fits the model too.
    levels = np.unique(np.ceil(made[picked] * 1e3 + 1) / 1e3)
    buckets = bucketed(problem, alone=4, most=6, shortest=False)
    model = JointModel(problem, buckets, levels, levels, len(made) + 1, whole_from=1)
    if not model.solve(nodes, guard_s, gap=0.02).feasible:
        return None
    rows, targets = [], []
    for c, y in enumerate(model.y):
        groups = np.array([round(n.varValue or 0) for n in model.n[c]], np.int64)
        for counts in _dealt(problem, groups, round(y.varValue or 0)):
            rows.append(counts)
            targets.append(levels[c])
    return Configuration(np.array(rows), np.array(targets)) if rows else None


def _dealt(problem: Problem, groups: Ints, steps: int) -> list[Ints]:
    """Deals groups, (J,), to micro-steps: largest first, to the one with the most idle GPUs."""
    counts = [np.zeros(len(groups), np.int64) for _ in range(steps)]
    for j in range(len(groups) - 1, -1, -1):
        for _ in range(groups[j]):
            for row in sorted(counts, key=lambda row: int(row @ problem.degrees)):
                row[j] += 1
                if problem.has_room(row):
                    break
                row[j] -= 1
    return counts
