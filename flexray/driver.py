"""The driver: has batches planned ahead, sends every rank its part, hears back, writes it down.

The next step is queued on every actor before the present one ends, so that no rank waits for the
driver. Tokens never pass through it.
"""

from __future__ import annotations

import enum
import math
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from flexray.actors.pool import ImpossibleRequest, Pool, PoolError, cluster_of
from flexray.actors.work import StepReport, slices
from flexray.datasets.sampler import Sampler
from flexray.display import Display, StepView
from flexray.errors import UserError
from flexray.events import DataEvent, EventLog, GenerationEvent, PlanLog
from flexray.prefetch import PlannedBatch, PlanRequest, Prefetch, warm_planners
from flexray.preparation import Job
from flexray.ray_cluster import connected
from flexray.records import spans, step_event, step_metrics
from flexray.run_directory import RunDirectory
from flexray.solver.calibration import Calibrator
from flexray.solver.communicators import CommunicatorCache
from flexray.tracking import Tracker


class State(enum.Enum):
    """Where a run stands."""

    INITIALIZING = "initializing"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"


class RunFailed(RuntimeError):
    """The run cannot go on: one line that says why."""


@dataclass(frozen=True)
class InFlight:
    """A step that the actors have been sent."""

    planned: PlannedBatch
    calls: list[Any]  # one a rank; none for a step without a label token


class Driver:
    """One run, from a checked job to its last step."""

    def __init__(self, job: Job, run: RunDirectory, display: Display) -> None:
        self.job, self.run, self.display = job, run, display
        self.config = job.config
        self.state = State.INITIALIZING
        self.steps_done = 0
        self.loss = math.nan

    def train(self) -> None:
        """Trains to the last step.

        Raises UserError or PlanningError before anything is trained, and RunFailed when the run
        cannot go on.
        """
        self.run.write_config(self.config)
        try:
            with ExitStack() as stack:
                self._open_logs(stack)
                self._describe_data()
                resources = stack.enter_context(connected(self.config.cluster))
                self.job.check_device(resources.device)
                warm_planners()
                pool = Pool(resources.gpus, resources.device, self.job.settings, self.job.data)
                self.pool = stack.enter_context(pool)
                self._initialize()
                self.state = State.RUNNING
                self._run_steps()
                self.state = State.FINISHED
        except ImpossibleRequest as error:
            raise UserError(str(error)) from None
        except PoolError as error:
            raise RunFailed(str(error)) from None
        finally:
            if self.state is not State.FINISHED:
                self.state = State.FAILED

    def _open_logs(self, stack: ExitStack) -> None:
        self.events = stack.enter_context(EventLog(self.run.events_path))
        self.plans = stack.enter_context(PlanLog(self.run.plans_path))
        self.tracker = Tracker(self.config, self.run.path, self.run.name, self.display.message)
        stack.callback(lambda: self.tracker.finish(self._summary()))

    def _describe_data(self) -> None:
        """Says and writes down what the over-length policy did."""
        documents = self.job.documents
        report = documents.report
        self.events.write(DataEvent(corpus=str(documents.corpus.path), **vars(report)))
        self.display.message(
            f"{report.rows:,} sequences of up to {int(documents.lengths.max()):,} tokens"
            + (f"; {report.split_rows:,} longer ones split" if report.split_rows else "")
            + (f"; {report.dropped_rows:,} longer ones dropped" if report.dropped_rows else "")
            + (f"; {report.truncated_rows:,} longer ones cut" if report.truncated_rows else "")
            + (f"; {report.lost_tokens:,} tokens lost" if report.lost_tokens else "")
        )

    def _initialize(self) -> None:
        """Forms the first generation and has the first plans made meanwhile."""
        began = time.perf_counter()
        job = self.job
        places = self.pool.places()
        self.display.message(
            f"{len(places)} ranks on {len({p.node for p in places})} node(s), "
            f"{job.parameters:,} parameters in {self.config.train.dtype}, run {self.run.path}"
        )
        self.calibrator = Calibrator(job.cost(places))
        job.check_longest(self.calibrator.cost, places)
        self.degrees = job.degrees(len(places))
        job.check_communicators(self.degrees)
        self.cluster = cluster_of(places)
        self.communicators = CommunicatorCache(self.config.planner.communicators_per_rank)
        train = self.config.train
        self.prefetch = Prefetch(
            job.documents,
            Sampler(job.documents.rows, train.batch_sequences, train.seed),
            steps=train.steps,
            ahead=self.config.planner.prefetch,
            request=self._plan_request,
        )
        self.generation = self.pool.form(1)
        self.events.write(
            GenerationEvent(
                generation=self.generation.number,
                world=self.generation.world,
                pids=[place.pid for place in places],
                nodes=[place.node for place in places],
                cause="start",
                pause_s=time.perf_counter() - began,
                at_step=self.steps_done + 1,
            )
        )

    def _run_steps(self) -> None:
        in_flight: InFlight | None = None
        for _ in range(self.config.train.steps):
            queued = self._dispatch(self.prefetch.next())
            if in_flight:
                self._complete(in_flight)
            in_flight = queued
        if in_flight:
            self._complete(in_flight)

    def _dispatch(self, planned: PlannedBatch) -> InFlight:
        batch, plan = planned.batch, planned.plan
        if batch.label_tokens == 0:
            return InFlight(planned, [])
        groups = [group.ranks for micro_step in plan.micro_steps for group in micro_step.groups]
        work = slices(
            plan,
            batch.rows,
            world=self.generation.world,
            step=batch.step,
            generation=self.generation.number,
            label_tokens=batch.label_tokens,
            changes=self.communicators.prepare(groups),
        )
        return InFlight(planned, self.pool.dispatch(work))

    def _complete(self, step: InFlight) -> None:
        reports: list[StepReport] = self.pool.wait(step.calls, "step")
        event = step_event(step.planned, reports, self.generation.number)
        self.steps_done, self.loss = event.step, event.loss
        self.events.write(event)
        self.plans.write(event.step, event.generation, step.planned.plan)
        self.tracker.log_step(event, step_metrics(step.planned, reports))
        self.display.step(StepView.of(event, step.planned, self.config.train.steps))
        if not math.isfinite(event.loss):
            raise RunFailed(
                f"the loss of step {event.step} is {event.loss}: lower train.learning_rate or look "
                "at the rows of that step in events.jsonl"
            )
        self.calibrator.observe(*spans(reports))

    def _plan_request(self) -> PlanRequest:
        return PlanRequest(
            cost=self.calibrator.fit(),
            cluster=self.cluster,
            degrees=self.degrees,
            cached=self.communicators.ranks,
        )

    def _summary(self) -> dict[str, float | int | str]:
        return {"state": self.state.value, "steps": self.steps_done, "final_loss": self.loss}
