"""Planning as Ray tasks: the processes that run them import the solver and no torch.

Usage:
    warm_planners()
    planned = plan_remotely.remote(lengths, request)   # Plan, ms at the best single degree
    bounded = bound_remotely.remote(planned, lengths, request)
"""

from __future__ import annotations

from dataclasses import dataclass

import ray

from flexray.solver.baselines import batch_adaptive
from flexray.solver.bound import tightened
from flexray.solver.cluster import Cluster
from flexray.solver.cost import CostModel
from flexray.solver.plan import Plan
from flexray.solver.planner import plan_step, warm


@dataclass(frozen=True)
class PlanRequest:
    """What a plan is made for and with."""

    cost: CostModel
    cluster: Cluster
    degrees: tuple[int, ...]
    cached: tuple[tuple[int, ...], ...]  # groups that have a communicator
    version: int = 0  # of the cost model and the ranks' speeds
    step_ms: float = 0.0  # what a step takes beside its plan
    errors: tuple[tuple[str, float], ...] = ()  # relative standard errors of coefficients


PLANNERS = 2
"""Processes that plan: with one step planned ahead, two plans are under way at most."""


@ray.remote(num_cpus=0)  # type: ignore[untyped-decorator]
def _warm() -> None:
    warm()


def warm_planners() -> None:
    """Starts the planners' processes and has them load their kernels, without waiting."""
    for _ in range(PLANNERS):
        _warm.remote()


@ray.remote(num_cpus=0)  # type: ignore[untyped-decorator]
def plan_remotely(lengths: tuple[int, ...], request: PlanRequest) -> tuple[Plan, float]:
    """Plans one batch; also the planned time at the best single degree."""
    cost, cluster, degrees = request.cost, request.cluster, request.degrees
    plan = plan_step(lengths, cost, cluster, degrees, cached=request.cached)
    return plan, batch_adaptive(lengths, cost, cluster, degrees).planned_ms


@ray.remote(num_cpus=0)  # type: ignore[untyped-decorator]
def bound_remotely(
    planned: tuple[Plan, float], lengths: tuple[int, ...], request: PlanRequest
) -> Plan:
    """The plan with a tight bound, in no more time than its step takes."""
    plan, _ = planned
    limit_s = plan.planned_ms / 1e3
    return tightened(plan, lengths, request.cost, request.cluster, request.degrees, limit_s=limit_s)
