"""Plans made ahead as Ray tasks, and their tight bounds behind them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import ray

from flexray.batches import Batch
from flexray.planning_tasks import PlanRequest
from flexray.prefetch import PlannedBatch, Prefetch
from flexray.records import model_events
from flexray.solver.cluster import Cluster
from flexray.solver.cost import CostModel
from flexray.solver.prediction import fits, predicted_ms

LENGTHS = (4000, 2500, 2400, 1500, 900, 700, 500, 400, 300, 300, 200, 100)
# A step of minutes: the bound may take as long.
COST = CostModel(1e-2, 1.0, micro_step_ms=500.0, tokens_per_gpu=1000)


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
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

    late = replace(planned, bound=never.remote(False))
    assert late.bounded().plan == planned.plan
    lost = waited_for(replace(planned, bound=never.remote(True)))
    assert lost.bounded().plan == planned.plan


@pytest.mark.parametrize(("factor", "is_again"), [(1.0, False), (1.08, False), (1.2, True)])
def test_a_plan_that_the_cost_model_has_overtaken_is_made_again(factor, is_again):
    requests = [request()]
    prefetch = Prefetch(batches(4), ahead=1, request=lambda: requests[-1])
    first = next(prefetch)
    cost = replace(
        COST, **{n: factor * getattr(COST, n) for n in ("quadratic", "linear", "micro_step_ms")}
    )
    requests.append(replace(requests[0], cost=cost, version=1))
    second = next(prefetch)  # was planned with the first model
    assert first.plan.planned_ms * (factor if is_again else 1) == pytest.approx(
        second.plan.planned_ms
    )
    assert second.request.version == is_again
    if is_again:
        replaced, now_ms = second.replaced
        assert replaced == first.plan and now_ms == pytest.approx(factor * replaced.planned_ms)
    else:
        assert second.replaced is None
    events = list(model_events(second, 0))
    assert [event.kind for event in events] == ["replan", "model"] * is_again
    if is_again:
        assert (events[0].step, events[0].version) == (2, 1)
        assert events[0].moved_s == pytest.approx(factor * events[0].planned_s)
        assert events[1].coefficients["linear"] == cost.linear and events[1].speeds == {}
    *_, last = prefetch
    assert last.replaced is None and last.request.version == 1  # asked for later


def test_a_plan_that_memory_has_no_room_for_any_more_is_made_again():
    requests = [replace(request(), degrees=(1, 2, 4, 8))]
    prefetch = Prefetch(batches(2), ahead=1, request=lambda: requests[-1])
    first = next(prefetch)
    groups = [g for m in first.plan.micro_steps for g in m.groups]
    largest = max(-(-g.tokens // g.degree) for g in groups)
    less = COST.with_capacity(largest - 1)
    requests.append(replace(requests[0], cost=less, version=1))
    second = next(prefetch)
    assert second.replaced is not None and not fits(first.plan, less, requests[0].cluster)
    assert second.replaced[1] == pytest.approx(first.plan.planned_ms)  # its time has not moved
    assert fits(second.plan, less, requests[0].cluster)


def test_a_rank_that_turned_slow_has_its_plans_made_again():
    requests = [request()]
    prefetch = Prefetch(batches(2), ahead=1, request=lambda: requests[-1])
    first = next(prefetch)
    slow = replace(requests[0].cluster, speeds=(1.0,) * 7 + (0.5,))
    requests.append(replace(requests[0], cluster=slow, version=1))
    second = next(prefetch)
    assert second.replaced == (first.plan, pytest.approx(predicted_ms(first.plan, COST, slow)))
    assert second.plan.planned_ms < second.replaced[1]  # it gets less
    (_, model) = model_events(second, 0)
    assert model.speeds == {"7": 0.5}
