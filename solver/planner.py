"""The planner: lengths in, a verified plan out.

A greedy plan is there at once; a search over configurations improves it (solver/search.py); a
joint MILP proposes other configurations (solver/joint.py); the best one is verified and returned
with a lower bound. Same input, same plan: effort is counted in evaluations and nodes, and time is
only a guard.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from flexray.solver.assemble import assemble
from flexray.solver.baselines import best_single_degree
from flexray.solver.bound import cheap_bound
from flexray.solver.cluster import Cluster
from flexray.solver.cost import CostModel
from flexray.solver.degrees import powers_of_two
from flexray.solver.joint import propose
from flexray.solver.plan import Plan
from flexray.solver.problem import Problem
from flexray.solver.search import PACK_ONLY, Found, drafts, greedy, like, search
from flexray.solver.verify import verify


@dataclass(frozen=True)
class Effort:
    """How much to search.

    Attributes:
        evaluations: places that the search tries (about 20 ns each) for 128 to 512 sequences;
            proportionally more, at most sixfold, for more, and less, at least an eighth, for fewer.
        nodes: branch-and-bound nodes of the joint MILP; 0 leaves it out.
        guard_s: wall time that the MILP never exceeds.
    """

    evaluations: int = 15_000_000
    nodes: int = 1
    guard_s: float = 1.0


# A plan within milliseconds, for whoever cannot wait.
AT_ONCE = Effort(evaluations=100_000, nodes=0)


def plan_step(
    lengths: Sequence[int],
    cost: CostModel,
    cluster: Cluster,
    degrees: Iterable[int] | None = None,
    *,
    effort: Effort = Effort(),
    cached: Collection[tuple[int, ...]] = (),
) -> Plan:
    """Plans one step.

    Args:
        lengths: tokens of each row of the batch, (rows,). Rows of length 0 are in no group and
            listed in `dropped`.
        degrees: legal degrees (`legal_degrees`); powers of two by default.
        effort: how much to search.
        cached: rank sets that have a communicator: preferred where plans are equally good.

    Returns:
        A plan that passed `verify`.

    Raises:
        PlanningError: a negative length, a row that no group holds, no legal degree.
    """
    began = time.perf_counter()
    degrees = tuple(degrees) if degrees is not None else powers_of_two(cluster.gpus)
    problem = Problem.of(lengths, cost, cluster, degrees)
    plan = _plan(problem, effort, cached)
    plan = replace(plan, solve_s=time.perf_counter() - began)
    verify(plan, lengths, cost, cluster, degrees)
    return plan


def warm() -> None:
    """Compiles or loads the kernels: seconds the first time on a machine, then milliseconds."""
    cost = CostModel(1.0, 1.0, micro_step_ms=1.0, tokens_per_gpu=4)
    plan_step([8, 4, 1], cost, Cluster((2,)), effort=Effort(evaluations=1000))


def _plan(problem: Problem, effort: Effort, cached: Collection[tuple[int, ...]]) -> Plan:
    if not len(problem.lengths):
        return Plan((), 0.0, 0.0, 0.0, "empty", problem.dropped)
    bound = cheap_bound(problem)
    best = best_single_degree(problem, cached)
    # A batch of a million sequences has so many micro-steps that packing is enough.
    if len(problem.lengths) * problem.fewest_micro_steps > PACK_ONLY:
        return best

    # Larger batches have more to decide.
    K = len(problem.lengths)
    evaluations = int(effort.evaluations * max(min(1.0, max(1 / 8, K / 128)), min(6.0, K / 512)))
    stop_at = bound * (1 + 1e-9)
    starts = [like(problem, best)]
    starts += [f.configuration for f in greedy(problem, evaluations // 10)]
    best = _better(problem, best, search(problem, starts, evaluations, stop_at), "search", cached)
    if effort.nodes and best.planned_ms > stop_at:
        proposed = propose(problem, best, effort.nodes, effort.guard_s)
        if proposed is not None:
            found = search(problem, [proposed, like(problem, best)], evaluations // 4, stop_at)
            best = _better(problem, best, found, "joint MILP", cached)
    return best


def _better(
    problem: Problem, best: Plan, found: Found, method: str, cached: Collection[tuple[int, ...]]
) -> Plan:
    """The plan of `found` if it is shorter than `best`."""
    if found.ms >= best.planned_ms * (1 - 1e-12):
        return best
    plan = assemble(problem, drafts(problem, found), best.lower_bound_ms, method, cached)
    return plan if plan is not None and plan.planned_ms < best.planned_ms else best
