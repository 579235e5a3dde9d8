"""Plans of batches, made as remote tasks ahead of the step that needs them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import ray

from flexray.actors.crew import PoolError
from flexray.batches import Batch
from flexray.planning_tasks import PlanRequest, bound_remotely, plan_remotely
from flexray.solver.plan import Plan
from flexray.solver.prediction import fits, predicted_ms

# A plan whose predicted time has moved by more than this is made again, and one that has no room.
MOVED = 0.10


@dataclass(frozen=True)
class PlannedBatch:
    """A batch with its plan.

    Attributes:
        best_single_ms: the same batch at the best single degree, planned.
        waited_s: how long the driver waited for the plan.
        request: what the plan was made with.
        replaced: the plan that was made before, with an older cost model, and its time under the
            present one; None where the first plan still held.
        bound: the call that tightens the plan's lower bound, if there is one.
    """

    batch: Batch
    plan: Plan
    best_single_ms: float
    waited_s: float
    request: PlanRequest
    replaced: tuple[Plan, float] | None = None
    bound: Any = None

    @property
    def speedup(self) -> float:
        """Planned, over the best single static degree."""
        planned_ms = self.plan.planned_ms
        return self.best_single_ms / planned_ms if planned_ms > 0 else 1.0

    def bounded(self) -> PlannedBatch:
        """With the tight lower bound, if it is there by now; else with the cheap one."""
        if self.bound is None:
            return self
        done, _ = ray.wait([self.bound], timeout=0)
        try:
            plan = ray.get(done[0]) if done else self.plan
        except ray.exceptions.RayError:  # nothing that training needs
            plan = self.plan
        return replace(self, plan=plan, bound=None)


@dataclass(frozen=True)
class _UnderWay:
    """A plan that is being made."""

    batch: Batch
    request: PlanRequest
    call: Any
    bound: Any

    def result(self) -> tuple[Plan, float, float]:
        """The plan, ms at the best single degree, and s that it was waited for."""
        began = time.perf_counter()
        try:
            plan, best_single_ms = ray.get(self.call)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except ray.exceptions.RayError as error:  # Ray has tried three times
            raise PoolError(f"the plan of step {self.batch.step} was lost: {error}") from None
        return plan, best_single_ms, time.perf_counter() - began


class Prefetch:
    """An iterator over planned batches, in their order, the plans of `ahead` more under way."""

    def __init__(
        self,
        batches: Iterator[Batch],
        *,
        ahead: int,
        request: Callable[[], PlanRequest],
        tight_bound: bool = False,
    ) -> None:
        """`request` is asked anew for every plan, so that plans follow the newest cost model.

        A plan is made again when the cost model has moved meanwhile, by MOVED of its time, or says
        that its packs do not fit any more.
        `tight_bound`: have the bound of every step's plan tightened behind it, on another core.
        """
        self._batches = batches
        self._ahead = ahead
        self._request = request
        self._tight_bound = tight_bound
        self._under_way: deque[_UnderWay] = deque()
        self._fill()

    def __iter__(self) -> Iterator[PlannedBatch]:
        return self

    def __next__(self) -> PlannedBatch:
        """The next batch and its plan. Raises PlanningError when it cannot be planned."""
        if not self._under_way:
            raise StopIteration
        made = self._under_way.popleft()
        plan, best_single_ms, waited = made.result()
        replaced, now = None, self._request()
        if now.version != made.request.version:
            planned_ms = predicted_ms(plan, now.cost, now.cluster)
            moved = abs(planned_ms - plan.planned_ms) > MOVED * plan.planned_ms
            if moved or not fits(plan, now.cost, now.cluster):
                replaced = plan, planned_ms
                made = self._ask(made.batch, now)
                plan, best_single_ms, again = made.result()
                waited += again
        self._fill()
        return PlannedBatch(
            *(made.batch, plan, best_single_ms, waited, made.request, replaced, made.bound)
        )

    def _fill(self) -> None:
        while len(self._under_way) <= self._ahead:
            batch = next(self._batches, None)
            if batch is None:
                return
            self._under_way.append(self._ask(batch, self._request()))

    def plan(self, batch: Batch, request: PlanRequest) -> Any:
        """A call that ends with the batch's plan, and ms at the best single degree."""
        return plan_remotely.remote(batch.lengths, request)

    def _ask(self, batch: Batch, request: PlanRequest) -> _UnderWay:
        call, bound = self.plan(batch, request), None
        if self._tight_bound and not batch.held_out:
            bound = bound_remotely.remote(call, batch.lengths, request)
        return _UnderWay(batch, request, call, bound)
