"""Batches and their plans, made as remote tasks ahead of the step that needs them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray

from flexray.actors.pool import PoolError
from flexray.datasets.documents import Documents
from flexray.datasets.sampler import Sampler
from flexray.solver.baselines import batch_adaptive
from flexray.solver.cluster import Cluster
from flexray.solver.cost import CostModel
from flexray.solver.plan import Plan
from flexray.solver.planner import plan_step, warm


@dataclass(frozen=True)
class Batch:
    """One global batch. The driver knows lengths and counts, never tokens."""

    step: int
    rows: tuple[int, ...]  # row ids
    lengths: tuple[int, ...]  # tokens of each row
    label_tokens: int  # after the shift, over all rows


@dataclass(frozen=True)
class PlanRequest:
    """What a plan is made for and with."""

    cost: CostModel
    cluster: Cluster
    degrees: tuple[int, ...]
    cached: tuple[tuple[int, ...], ...]  # groups that have a communicator


@dataclass(frozen=True)
class PlannedBatch:
    """A batch with its plan."""

    batch: Batch
    plan: Plan
    best_single_ms: float  # the same batch at the best single degree, planned
    waited_s: float  # how long the driver waited for the plan

    @property
    def speedup(self) -> float:
        """Planned, over the best single static degree."""
        planned_ms = self.plan.planned_ms
        return self.best_single_ms / planned_ms if planned_ms > 0 else 1.0


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


class Prefetch:
    """Deals batches in the sampler's order, their plans under way `ahead` steps early."""

    def __init__(
        self,
        documents: Documents,
        sampler: Sampler,
        *,
        steps: int,
        ahead: int,
        request: Callable[[], PlanRequest],
    ) -> None:
        """`request` is asked anew for every plan, so that plans follow the newest cost model."""
        self._lengths, self._label_tokens = documents.lengths, documents.label_tokens
        self._sampler = sampler
        self._steps = steps
        self._ahead = ahead
        self._request = request
        self._started = 0
        self._under_way: deque[tuple[Batch, Any]] = deque()
        self._fill()

    def next(self) -> PlannedBatch:
        """The next step's batch and plan. Raises PlanningError when it cannot be planned."""
        began = time.perf_counter()
        batch, call = self._under_way.popleft()
        try:
            plan, best_single_ms = ray.get(call)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except ray.exceptions.RayError as error:  # Ray has tried three times
            raise PoolError(f"the plan of step {batch.step} was lost: {error}") from None
        waited = time.perf_counter() - began
        self._fill()
        return PlannedBatch(batch, plan, best_single_ms, waited)

    def _fill(self) -> None:
        while len(self._under_way) <= self._ahead and self._started < self._steps:
            self._started += 1
            rows = self._sampler.next()
            batch = Batch(
                step=self._started,
                rows=tuple(rows.tolist()),
                lengths=tuple(self._lengths[rows].tolist()),
                label_tokens=int(self._label_tokens[rows].sum()),
            )
            self._under_way.append((batch, plan_remotely.remote(batch.lengths, self._request())))
