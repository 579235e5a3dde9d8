"""The driver: has batches planned ahead, sends every rank its part, hears back, writes it down.

The next step is queued on every actor before the present one ends, so that no rank waits for the
driver. Tokens never pass through it.
"""

from __future__ import annotations

import enum
import json
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from flexray.actors.pool import ImpossibleRequest, Pool, PoolError, cluster_of
from flexray.actors.work import RankStep, StepReport, slices
from flexray.batches import Batch, batches
from flexray.callbacks import Callbacks
from flexray.checkpoints import Checkpoint, CheckpointFolder, RunState
from flexray.display import Display
from flexray.errors import RunFailed, UserError
from flexray.journal import Journal
from flexray.nonfinite import NonfinitePolicy
from flexray.prefetch import PlannedBatch, PlanRequest, Prefetch, warm_planners
from flexray.preparation import Job
from flexray.profiling import Profiler, Steps
from flexray.ray_cluster import connected
from flexray.records import spans
from flexray.resume import learned, with_learned
from flexray.run_directory import RunDirectory
from flexray.saving import Saver, check_shared
from flexray.solver.calibration import Calibrator
from flexray.solver.communicators import CommunicatorCache
from flexray.stopping import StopRequest
from flexray.validation import ValidationSum


class State(enum.Enum):
    """Where a run stands."""

    INITIALIZING = "initializing"
    RUNNING = "running"
    STOPPED = "stopped"
    FINISHED = "finished"
    FAILED = "failed"


@dataclass(frozen=True)
class InFlight:
    """Work that the actors have been sent."""

    planned: PlannedBatch
    calls: list[Any]  # one a rank; none for a batch without a label token


class Driver:
    """One run, from a checked job to its last step."""

    def __init__(
        self,
        job: Job,
        run: RunDirectory,
        display: Display,
        *,
        resume: Checkpoint | None = None,
        callbacks: Callbacks | None = None,
        profile: Steps | None = None,
        stop: StopRequest,
    ) -> None:
        """`resume`: where to go on; `run` is then the same run's directory.

        Raises CorpusError, before anything is written, where the data are not what they were.
        """
        self.job, self.config, self.run = job, job.config, run
        self.resume, self.profile = resume, profile
        done, cursor = (resume.state.step, resume.state.sampler) if resume else (0, None)
        self.work = batches(job.documents, self.config.train, done=done, cursor=cursor)
        self.checkpoints = CheckpointFolder.of(self.config, run.path.absolute())
        self.journal = Journal(self.config, run, display, callbacks or Callbacks(), resume)
        self.stop = stop
        self.validation = ValidationSum()
        self.nonfinite = NonfinitePolicy(self.config.train.max_nonfinite_steps)
        self.state = State.INITIALIZING

    @property
    def state(self) -> State:
        """Where the run stands."""
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        self._state, self.journal.state = state, state.value

    def train(self) -> None:
        """Trains to the last step, or to the one after which it is told to stop.

        Raises UserError or PlanningError before anything is trained, and RunFailed when the run
        cannot go on.
        """
        try:
            with ExitStack() as stack:
                stack.enter_context(self.stop)
                stack.enter_context(self.journal)
                self.journal.data(self.job.documents)
                resources = stack.enter_context(connected(self.config.cluster))
                self.job.check_device(resources.device)
                warm_planners()
                pool = Pool(resources.gpus, resources.device, self.job.settings, self.job.data)
                self.pool = stack.enter_context(pool)
                self._initialize(resources.device)
                self.state = State.RUNNING
                self._run_steps()
                is_done = self.journal.steps_done == self.config.train.steps
                self.state = State.FINISHED if is_done else State.STOPPED
        except ImpossibleRequest as error:
            raise UserError(str(error)) from None
        except PoolError as error:
            raise RunFailed(str(error)) from None
        finally:
            if self.state in (State.INITIALIZING, State.RUNNING):
                self.state = State.FAILED

    def _initialize(self, device: str) -> None:
        """Forms the first generation, of the checkpoint if there is one; plans meanwhile."""
        began = time.perf_counter()
        places = self.pool.places()
        self.journal.message(
            f"{len(places)} ranks on {len({p.node for p in places})} node(s), "
            f"{self.job.parameters:,} parameters in {self.config.train.dtype}, run {self.run.path}"
        )
        check_shared(self.pool, self.checkpoints)
        cost, self.degrees = self.job.checked_on(places)
        self.calibrator = Calibrator(
            with_learned(cost, self.resume.state.learned) if self.resume else cost
        )
        self.cluster = cluster_of(places)
        self.communicators = CommunicatorCache(self.config.planner.communicators_per_rank)
        tight = self.config.planner.tight_bound
        self.prefetch = Prefetch(
            self.work,
            ahead=self.config.planner.prefetch,
            request=self._plan_request,
            tight_bound=device == "cuda" if tight is None else tight,
        )
        self.generation = self.pool.form(self.journal.last_generation + 1)
        if self.resume:
            self.pool.load(self.resume.location, self.resume.state.counters)
        keep, newest = self.config.checkpoint.keep, self.journal.steps_done
        self.saver = Saver(self.pool, self.checkpoints, keep, newest)
        self.profiler = Profiler(self.pool, self.profile, self.run.path / "profile")
        self.journal.generation(self.generation, pause_s=time.perf_counter() - began)

    def _run_steps(self) -> None:
        self.stop.heard = lambda: self.journal.message(
            "Stopping after the steps under way, with a checkpoint (again: at once)"
        )
        try:
            self._work_through()
        except RunFailed:  # of a callback, or too many steps skipped: the ranks are well
            with suppress(PoolError):
                self.journal.checkpoints(self.saver.finish())
            raise

    def _work_through(self) -> None:
        in_flight: InFlight | None = None
        last: Batch | None = None
        is_between_steps = True
        for planned in self.prefetch:
            if self.stop.requested and is_between_steps:
                break
            queued = self._dispatch(planned)
            if in_flight:
                self._complete(in_flight)
            in_flight = queued
            if not planned.batch.held_out:
                last = planned.batch
            is_between_steps = planned.batch.ends_step
            if last and is_between_steps:
                self._save_if_due(last)
        if in_flight:
            self._complete(in_flight)
        if last:
            self.journal.checkpoints(self.saver.last(self._state_after(last)))

    def _dispatch(self, planned: PlannedBatch) -> InFlight:
        step, work = planned.batch.step, self._slices(planned)
        if planned.batch.held_out:
            return InFlight(planned, self.pool.evaluate(work) if work else [])
        self.profiler.before(step)
        calls = self.pool.dispatch(work) if work else []
        self.profiler.after(step)
        return InFlight(planned, calls)

    def _slices(self, planned: PlannedBatch) -> list[RankStep]:
        batch, plan = planned.batch, planned.plan
        if batch.label_tokens == 0:
            return []
        groups = [group.ranks for micro_step in plan.micro_steps for group in micro_step.groups]
        return slices(
            plan,
            batch.rows,
            world=self.generation.world,
            step=batch.step,
            generation=self.generation.number,
            label_tokens=batch.label_tokens,
            changes=self.communicators.prepare(groups),
        )

    def _complete(self, work: InFlight) -> None:
        if work.planned.batch.held_out:
            self._complete_validation(work)
        else:
            self._complete_step(work)
        # Not before all of its step is written down: a resume would leave out the rest.
        if work.planned.batch.ends_step:
            self.journal.checkpoints(self.saver.poll(work.planned.batch.step))

    def _complete_step(self, step: InFlight) -> None:
        reports: list[StepReport] = self.pool.wait(step.calls, "step")
        self.journal.step(step.planned, reports, self.generation.number)
        if written := self.profiler.done(step.planned.batch.step):
            self.journal.message(written)
        self.nonfinite.check(reports)
        if step.planned.batch.step > self.journal.first_step:  # first calls teach nothing
            self.calibrator.observe(*spans(reports))

    def _complete_validation(self, part: InFlight) -> None:
        batch = part.planned.batch
        self.validation.add(batch, self.pool.wait(part.calls, "validation"))
        if batch.ends_step:
            self.journal.validation(self.validation.event(batch.step))
            self.validation = ValidationSum()

    def _save_if_due(self, batch: Batch) -> None:
        every = self.config.checkpoint.every
        if every and batch.step % every == 0:
            self.journal.checkpoints(self.saver.start(self._state_after(batch)))

    def _state_after(self, batch: Batch) -> RunState:
        """What to go on from after `batch`, whatever was dealt and planned ahead of it."""
        return RunState(
            step=batch.step,
            sampler=batch.cursor,
            counters={},
            learned=learned(self.calibrator.cost),
            config=self.config.named(self.run.name).to_dict(),
            model=json.loads(self.job.model.to_json_string()),
            world=self.generation.world,
            wandb_run_id=self.journal.wandb_run_id,
        )

    def _plan_request(self) -> PlanRequest:
        return PlanRequest(
            cost=self.calibrator.fit(),
            cluster=self.cluster,
            degrees=self.degrees,
            cached=self.communicators.ranks,
        )
