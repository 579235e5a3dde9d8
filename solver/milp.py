"""PuLP + HiGHS: quiet, on one thread, limited by nodes and judged by what HiGHS itself reports.

PuLP calls a time limit "optimal" and knows no node limit at all (pulp#649, #711, #876), so its
status is not asked: a solution counts if HiGHS calls it feasible, a bound is its dual bound.
"""

from __future__ import annotations

import math
import os
import sys
import time
from dataclasses import dataclass
from functools import cache
from typing import Any

import highspy
import pulp


@dataclass(frozen=True)
class Outcome:
    """What a solve left behind.

    Attributes:
        feasible: the variables hold a feasible solution.
        bound: no solution is under this (minimisation); -inf if nothing is known.
    """

    feasible: bool
    bound: float


class _Highs(pulp.HiGHS):  # type: ignore[misc]
    def findSolutionValues(self, lp):  # type: ignore[no-untyped-def]  # noqa: N802
        try:
            return super().findSolutionValues(lp)
        except KeyError:  # a node limit; the values are already in the variables
            return pulp.LpStatusNotSolved, pulp.LpSolutionNoSolutionFound


@cache
def _greeted() -> None:
    """Lets HiGHS print its banner, which it does once a process and asks nobody, to nowhere."""
    sys.stdout.flush()
    kept = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        highspy.Highs()
    finally:
        os.dup2(kept, 1)
        os.close(nowhere)
        os.close(kept)


def minimise(
    problem: pulp.LpProblem,
    nodes: int,
    guard_s: float,
    gap: float = 1e-4,
    cpu_s: float = math.inf,
) -> Outcome:
    """Solves until `nodes` branch-and-bound nodes, a relative `gap`, or a limit of time.

    Args:
        guard_s: wall time.
        cpu_s: time of this process's CPU: limits effort alike on a machine that does other work.
    """
    _greeted()
    solver = _Highs(msg=False, threads=1, timeLimit=guard_s, gapRel=gap, mip_max_nodes=nodes)
    if cpu_s < math.inf:
        solver.callbackTuple = (_interrupt, time.process_time() + cpu_s)
        kinds = highspy.cb.HighsCallbackType
        solver.callbacksToActivate = [kinds.kCallbackMipInterrupt, kinds.kCallbackSimplexInterrupt]
    problem.solve(solver)
    model = problem.solverModel
    info = model.getInfo()
    feasible = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    if model.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
        return Outcome(False, math.inf)
    bound = info.mip_dual_bound
    return Outcome(feasible, bound if math.isfinite(bound) else -math.inf)


def _interrupt(kind: object, message: str, out: object, into: Any, ends: float) -> None:
    into.user_interrupt = time.process_time() > ends
