"""What is written down of a step, from its plan and the ranks' reports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flexray.actors.work import StepReport
from flexray.events import ModelEvent, ReplanEvent, StepEvent
from flexray.prefetch import PlannedBatch
from flexray.resume import learned
from flexray.solver.calibration import Span, StepSpans
from flexray.solver.memory import Peak


def step_event(
    planned: PlannedBatch, reports: Sequence[StepReport], generation: int, *, is_first: bool
) -> StepEvent:
    """The event of a step; without reports (no label token in the batch) nothing was done.

    The plan wait is what the ranks lost: the driver's wait for the plan, as far as the ranks idled
    before this step (the next step is queued while the present one runs). Before the first step
    of the process it is the whole wait.
    """
    batch, plan = planned.batch, planned.plan
    idle_s = max((report.idle_ms for report in reports), default=0.0) / 1e3
    return StepEvent(
        step=batch.step,
        loss=reports[0].loss if reports else 0.0,
        tokens=sum(batch.lengths),
        label_tokens=batch.label_tokens,
        rows=batch.rows,
        step_s=max((report.step_ms for report in reports), default=0.0) / 1e3,
        planned_s=(plan.planned_ms + planned.request.step_ms) / 1e3,
        plan_wait_s=planned.waited_s if is_first else min(planned.waited_s, idle_s),
        solve_s=plan.solve_s,
        lower_bound_s=plan.lower_bound_ms / 1e3,
        groups=plan.degrees,
        generation=generation,
        learning_rate=reports[0].learning_rate if reports else 0.0,
        skipped=bool(reports) and reports[0].skipped,
        model_version=planned.request.version,
        idle=[round(_idle(report), 4) for report in reports],
    )


def _idle(report: StepReport) -> float:
    """Share of a step in which a rank did nothing of its own: it waited for others."""
    return sum(m.wait_ms for m in report.micro_steps) / report.step_ms


def step_metrics(planned: PlannedBatch, reports: Sequence[StepReport]) -> dict[str, float]:
    """What else is tracked of a step."""
    metrics = {"plan/speedup": planned.speedup, "plan/gap": planned.plan.gap}
    if reports:
        total = sum(report.step_ms for report in reports)
        waited = sum(m.wait_ms for report in reports for m in report.micro_steps)
        exchanged = sum(m.all_to_all_ms for report in reports for m in report.micro_steps)
        metrics |= {
            "train/gradient_norm": reports[0].gradient_norm,
            "time/wait_share": waited / total,
            "time/all_to_all_share": exchanged / total,
            "time/snapshot_share": sum(report.snapshot_ms for report in reports) / total,
            "time/idle_s": max(report.idle_ms for report in reports) / 1e3,
            "memory/peak_mb": max(report.peak_memory_mb for report in reports),
            "plan/new_communicators": max(report.new_communicators for report in reports),
        }
    return metrics


def model_events(planned: PlannedBatch, version: int) -> Iterator[ModelEvent | ReplanEvent]:
    """What the plan of a step tells of the cost model; `version`: of the step before."""
    step, request = planned.batch.step, planned.request
    if planned.replaced is not None:
        plan, now_ms = planned.replaced
        yield ReplanEvent(
            step=step,
            planned_s=(plan.planned_ms + request.step_ms) / 1e3,
            moved_s=(now_ms + request.step_ms) / 1e3,
            version=request.version,
        )
    if request.version != version:
        cost, speeds = request.cost, enumerate(request.cluster.speed)
        yield ModelEvent(
            step=step,
            version=request.version,
            coefficients=learned(cost)
            | {"buffers_mb": cost.buffers_mb, "mb_per_token": cost.mb_per_token},
            errors=dict(request.errors),
            speeds={str(rank): speed for rank, speed in speeds if speed != 1},
            step_ms=request.step_ms,
        )


def step_spans(reports: Sequence[StepReport]) -> StepSpans:
    """What the cost model learns from the reports of a step.

    The whole time of one that made communicators teaches nothing.
    """
    return StepSpans(
        spans=tuple(
            Span(
                *(report.rank, number, m.degree, m.tokens, m.squares, m.sequences),
                compute_ms=m.own_work_ms,
                comm_ms=m.all_to_all_ms,
            )
            for report in reports
            for number, m in enumerate(report.micro_steps)
        ),
        measured_ms=max(report.step_ms for report in reports),
        is_usual=not any(report.new_communicators for report in reports),
        peaks=tuple(
            Peak(max(-(-m.tokens // m.degree) for m in report.micro_steps), report.peak_memory_mb)
            for report in reports
            if report.tells_memory
        ),
    )
