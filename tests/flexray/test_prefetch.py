"""Plans made ahead as Ray tasks, and their tight bounds behind them."""

from __future__ import annotations

import pytest
import ray

from flexray.batches import Batch
from flexray.planning_tasks import PlanRequest
from flexray.prefetch import PlannedBatch, Prefetch
from flexray.solver.cluster import Cluster
from flexray.solver.cost import CostModel

LENGTHS = (4000, 2500, 2400, 1500, 900, 700, 500, 400, 300, 300, 200, 100)
# A step of minutes: the bound may take as long.
COST = CostModel(1e-2, 1.0, micro_step_ms=500.0, tokens_per_gpu=1000)


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def batches(steps: int):
    for step in range(1, steps + 1):
        yield Batch(step, tuple(range(len(LENGTHS))), LENGTHS, label_tokens=100, cursor={})


def request() -> PlanRequest:
    return PlanRequest(COST, Cluster((4, 4)), (1, 2, 4), ())


def waited_for(planned: PlannedBatch) -> PlannedBatch:
    ray.wait([planned.bound], timeout=120)
    return planned


def test_a_tight_bound_comes_behind_the_plan():
    planned = waited_for(next(Prefetch(batches(2), ahead=1, request=request, tight_bound=True)))
    bounded = planned.bounded()
    assert planned.plan.lower_bound_ms < bounded.plan.lower_bound_ms <= planned.plan.planned_ms
    assert bounded.plan.micro_steps == planned.plan.micro_steps
    assert bounded.bounded() is bounded


def test_a_bound_that_is_late_or_lost_leaves_the_cheap_one():
    planned = next(Prefetch(batches(1), ahead=1, request=request))
    assert planned.bounded() is planned

    @ray.remote(num_cpus=0, max_retries=0)
    def never(lost: bool) -> None:
        if lost:
            raise RuntimeError("lost")
        import time

        time.sleep(3600)

    late = PlannedBatch(planned.batch, planned.plan, 1.0, 0.0, never.remote(False))
    assert late.bounded().plan == planned.plan
    lost = waited_for(PlannedBatch(planned.batch, planned.plan, 1.0, 0.0, never.remote(True)))
    assert lost.bounded().plan == planned.plan
