"""The driver: one run, from a checked job to its last step, with one generation after another.

The ranks may change at any step. A generation is worked with (step_loop.py) until the run is
through, another membership is due, or a rank is lost; then the next one is formed, from the copies
of the training state that the ranks keep for one another, and goes on where nothing is lost.
"""

from __future__ import annotations

import enum
import json
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from flexray.actors.crew import ImpossibleRequest, PoolError
from flexray.actors.membership import Change, Membership
from flexray.actors.pool import LOOK_S, Broken, Losses, Pool, cluster_of
from flexray.actors.seat import Copies, Initial, Saved
from flexray.actors.worker import Place, Worker
from flexray.batches import Batch, batches
from flexray.callbacks import Callbacks
from flexray.checkpoints import Checkpoint, CheckpointFolder, RunState
from flexray.display import Display
from flexray.errors import RunFailed, UserError
from flexray.events import Cause
from flexray.journal import Journal
from flexray.ledger import Ledger
from flexray.nonfinite import NonfinitePolicy
from flexray.planning_tasks import PlanRequest, warm_planners
from flexray.prefetch import Prefetch
from flexray.preparation import Job
from flexray.profiling import Profiler, Steps
from flexray.ray_cluster import Resources, connected
from flexray.resume import learned, with_learned
from flexray.run_directory import RunDirectory
from flexray.saving import Saver
from flexray.scaling import Scaling, check_scale
from flexray.solver.calibration import Calibrator
from flexray.solver.communicators import CommunicatorCache
from flexray.solver.plan import PlanningError
from flexray.step_loop import StepLoop
from flexray.stopping import StopRequest

LESS = 0.8  # of what did not fit is planned next
MOST_FAILURES = 10  # generations in a row that end before a step is committed


class State(enum.Enum):
    """Where a run stands."""

    INITIALIZING = "initializing"
    RUNNING = "running"
    RECONFIGURING = "reconfiguring"
    STOPPED = "stopped"
    FINISHED = "finished"
    FAILED = "failed"


class Driver:
    """One run, from a checked job to its last step."""

    worker: Any = Worker  # the actors' class
    planning: Callable[..., Prefetch] = Prefetch

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
        self.ledger = self._ledger_after(resume)
        self.checkpoints = CheckpointFolder.of(self.config, run.path.absolute())
        self.journal = Journal(self.config, run, display, callbacks or Callbacks(), resume)
        self.stop = stop
        self.scaling = Scaling(run)
        self.nonfinite = NonfinitePolicy(self.config.train.max_nonfinite_steps)
        self.loop: StepLoop | None = None  # of the present generation
        self.number = self.journal.last_generation
        self.begun = 0  # the newest step that had begun when a generation was lost
        self.failures: list[Losses] = []  # since a step was committed
        self.failed_at = 0  # steps that were committed then
        self.capacity: int | None = None  # tokens a GPU, where more did not fit
        self.gave_up = ""  # why the run is to end, with a checkpoint
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
                shared = stack.enter_context(self.checkpoints.token())
                self.pool = stack.enter_context(self._pool(resources, shared))
                self._initialize(resources.device)
                self._train()
                is_done = self.journal.steps_done == self.config.train.steps
                self.state = State.FINISHED if is_done else State.STOPPED
        except ImpossibleRequest as error:
            raise UserError(str(error)) from None
        except PoolError as error:
            raise RunFailed(str(error)) from None
        finally:
            if self.state in (State.INITIALIZING, State.RUNNING, State.RECONFIGURING):
                self.state = State.FAILED

    def _pool(self, resources: Resources, shared: Path | None) -> Pool:
        cluster = self.config.cluster
        at_start = resources.at_start or resources.target
        self.membership = Membership(resources.target, at_start, shard_size=cluster.shard_size)
        return Pool(
            self.membership,
            resources.device,
            self.job.settings,
            self.job.data,
            at_start=resources.at_start,
            shared=shared,
            silence_s=cluster.silence_s,
            worker=self.worker,
        )

    def _initialize(self, device: str) -> None:
        """Waits for the first actors, and checks what depends on them."""
        self.since = time.monotonic()  # when training stood still, or was to begin
        self.pool.start()
        places = self.pool.candidates()
        self.journal.message(
            f"{len(places)} ranks on {len({p.node for p in places})} node(s), "
            f"{self.job.parameters:,} parameters in {self.config.train.dtype}, run {self.run.path}"
        )
        cost, _ = self.job.checked_on(places)
        self.fewest = self.job.fewest(cost, places)
        if self.resume:
            cost = with_learned(cost, self.resume.state.learned)
        self.calibrator = Calibrator(cost, ())
        tight = self.config.planner.tight_bound
        self.tight_bound = device == "cuda" if tight is None else tight
        keep, newest = self.config.checkpoint.keep, self.journal.steps_done
        self.saver = Saver(self.pool, self.checkpoints, keep, newest)
        self.profiler = Profiler(self.pool, self.profile, self.run.path / "profile")

    def _train(self) -> None:
        """Works with one generation after another until the run is through."""
        cause: Cause | None = "start"
        while cause:
            try:
                self._form(cause)
                cause = self._run_steps()
                if cause:
                    self._make_way()
            except Broken as error:
                cause = self._recover(error)

    def _form(self, cause: Cause) -> None:
        """Forms the next generation; its first steps are planned meanwhile."""
        self._wait_for_members()
        origin = self._origin()
        self.communicators = CommunicatorCache(self.config.planner.communicators_per_rank)
        # Ranks that only save the state need no plan, and may be too few for one.
        work = self.ledger.rewind()
        prefetch = () if self._is_ending else self._prefetch(work, self.pool.candidates())
        self.number += 1
        self.generation = self.pool.form(self.number, origin)
        self.membership.least = self.fewest
        self.journal.generation(
            self.generation,
            cause,
            pause_s=time.monotonic() - self.since,
            steps_again=max(0, self.begun - self.journal.steps_done),
        )
        self.begun = 0
        self.loop = StepLoop(
            self.pool,
            self.generation,
            prefetch,
            self.communicators,
            ledger=self.ledger,
            journal=self.journal,
            saver=self.saver,
            profiler=self.profiler,
            nonfinite=self.nonfinite,
            calibrator=self.calibrator,
            state_after=self._state_after,
            save_every=self.config.checkpoint.every,
            copy_every=self.config.checkpoint.copy_every,
        )
        self.state = State.RUNNING

    def _prefetch(self, work: Ledger, places: tuple[Place, ...]) -> Prefetch:
        """Plans of what is not committed yet, on these ranks."""
        cost, self.degrees = self.job.cost(places), self.job.degrees(len(places))
        if self.capacity is not None:
            cost = cost.with_capacity(min(self.capacity, cost.capacity(len(places))))
        self.calibrator = self.calibrator.on(
            with_learned(cost, learned(self.calibrator.cost)),
            [(p.node, p.pid) for p in places],
            least_tokens=self.job.longest_share(len(places)),
        )
        self.cluster = cluster_of(places)
        return self.planning(
            work,
            ahead=self.config.planner.prefetch,
            request=self._plan_request,
            tight_bound=self.tight_bound,
        )

    def _run_steps(self) -> Cause | None:
        """Until the run is through, None, or other members are due: why."""
        assert self.loop is not None
        self.stop.heard = lambda: self.journal.message(
            "Stopping after the steps under way, with a checkpoint (again: at once)"
        )
        try:
            is_through = self.loop.run(self._is_over)
            change = None if is_through or self._is_ending else self._due_change()
            if change is None:
                self._finish(self.loop)
        except PlanningError as error:
            self._outgrown(error)
            return "memory"
        except RunFailed:  # of a callback, or too many steps skipped: the ranks are well
            with suppress(PoolError):
                self.journal.checkpoints(self.saver.finish(self.journal.steps_done))
            raise
        return change

    @property
    def _is_ending(self) -> bool:
        return self.stop.requested or bool(self.gave_up)

    def _is_over(self) -> bool:
        self._look_around()
        return self._is_ending or self._due_change() is not None

    def _due_change(self) -> Change | None:
        """Why other members are due. But for a drain, a checkpoint is first written to its end."""
        assert self.loop is not None
        change = self.pool.change
        is_put_off = change == "scale" and self.saver.step is not None
        self.loop.holds_saves = is_put_off
        return None if is_put_off else change

    def _finish(self, loop: StepLoop) -> None:
        """Commits what is done, and writes the last checkpoint."""
        if not self.ledger.is_settled:
            loop.settle()
        if last := self.ledger.committed:
            self.journal.checkpoints(self.saver.last(self._state_after(last)))
        if self.gave_up:
            raise RunFailed(self.gave_up)

    def _make_way(self) -> None:
        """Between two steps: commits all, and has the ranks leave, for another generation."""
        assert self.loop is not None
        self._pause()
        self.loop.settle()
        self.journal.checkpoints(self.saver.break_off(self.journal.steps_done))
        if losses := self.pool.regroup():
            raise Broken(str(losses))

    def _recover(self, error: Broken) -> Cause:
        """After a loss: what the survivors' copies hold is where the next generation goes on."""
        self._pause()
        losses = self.pool.regroup()
        largest = 0
        if self.loop:
            self.begun = max(self.begun, self.loop.begun)
            if copies := self.pool.newest_copies():
                self.loop.rescue(copies.step)
            largest = self.loop.largest_share
        self.loop = None
        self.journal.checkpoints(self.saver.break_off(self.journal.steps_done))
        if self.journal.steps_done > self.failed_at:
            self.failures = []
        self.failed_at = self.journal.steps_done
        self.failures.append(losses)
        # Where nobody was lost it is the work itself that fails.
        unexplained = [not lost and not lost.full for lost in self.failures[-2:]] == [True, True]
        too_large = [lost.cause for lost in self.failures[-3:]] == ["memory"] * 3
        if unexplained or too_large or len(self.failures) >= MOST_FAILURES:
            raise RunFailed(f"{error}; {losses} ({len(self.failures)} generations in a row)")
        self.journal.message(f"{error} ({losses})")
        if losses.full and losses.cause == "memory":
            self._hold_less(largest)
        return losses.cause

    def _hold_less(self, tokens: int) -> None:
        """Plans smaller packs after ranks ran out of memory with up to `tokens` a GPU.

        Raises RunFailed where the longest sequence would not fit any more.
        """
        if not tokens:
            raise RunFailed("the ranks cannot hold their shares of the training state: use more")
        needed = self.job.longest_share(self.generation.world)
        if needed >= tokens:
            raise RunFailed(
                f"out of memory with {tokens:,} tokens a GPU, and the longest sequence needs "
                f"{needed:,} on each of {self.generation.world}: use more GPUs, turn on "
                "model.activation_checkpointing, or lower data.max_length"
            )
        self.capacity = max(needed, int(LESS * tokens))
        self.journal.message(f"plans hold {self.capacity:,} tokens a GPU at most from here on")

    def _pause(self) -> None:
        """The ranks change from here on."""
        if self.state is State.RUNNING:
            self.since = time.monotonic()
        self.state = State.RECONFIGURING
        self.profiler.forget()

    def _origin(self) -> Initial | Saved | Copies:
        """Where the next generation's training state comes from."""
        copies = self.pool.newest_copies()
        if copies and copies.step >= self.journal.steps_done:
            return copies
        saved = [c for c in (self.resume, self.checkpoints.newest()) if c]
        newest = max(saved, key=lambda checkpoint: checkpoint.state.step, default=None)
        step = newest.state.step if newest else 0
        if lost := self.journal.steps_done - step:
            where = f"the checkpoint of step {step}" if newest else "the start: no checkpoint yet"
            self.journal.message(
                f"the state after step {self.journal.steps_done} is lost, with a rank and the one "
                f"that kept its copy: back to {where}; {lost} steps are made again"
            )
            self.journal.back_to(step, newest.location if newest else "")
            self.ledger = self._ledger_after(newest)
            self.nonfinite = NonfinitePolicy(self.config.train.max_nonfinite_steps)
            self.begun, self.failed_at = max(self.begun, step + lost), step
        return Saved(newest.location, step, newest.state.counters) if newest else Initial()

    def _wait_for_members(self) -> None:
        """Until there are enough; gives up after cluster.wait_s, or when told to stop."""
        self.pool.watch()
        deadline = time.monotonic() + self.config.cluster.wait_s
        is_told = False
        while not self.pool.candidates():
            if not is_told:
                self.journal.message(
                    f"{len(self.membership.alive)} of the {self.membership.least} ranks that are "
                    f"needed are there: waiting for more, for {self.config.cluster.wait_s:g} s "
                    "(cluster.wait_s)"
                )
                is_told = True
            if self.stop.requested or time.monotonic() > deadline:
                self._give_up()
                return
            time.sleep(LOOK_S)
            self._look_around()

    def _give_up(self) -> None:
        """With the ranks that are left only the state is saved."""
        if not self.stop.requested:
            self.gave_up = (
                f"{self.membership.least} ranks are needed and did not come in "
                f"{self.config.cluster.wait_s:g} s (cluster.wait_s)"
            )
        self.membership.least = 1
        if not self.pool.candidates():
            why = self.gave_up or "stopped while it waited for ranks"
            raise RunFailed(f"{why}, and those that are left are too few to save the state")

    def _outgrown(self, error: PlanningError) -> None:
        """Has the run wait for more ranks.

        Raises the error where no more are wanted; what was trained is saved then.
        """
        assert self.loop is not None
        world = self.generation.world
        self.loop.complete_all()
        if self.membership.target <= world:
            self._finish(self.loop)
            raise error
        self.journal.message(f"{world} ranks are too few: {error}")
        self.membership.least = world + 1

    def _look_around(self) -> None:
        """Hears what has become of actors and nodes, and what is asked of the run."""
        self.pool.watch()
        for line in self.pool.news():
            self.journal.message(line)
        gpus = self.scaling.take()
        if gpus is None:
            return
        try:
            check_scale(self.config.cluster, gpus)
            if gpus < self.fewest:
                raise UserError(f"{gpus} GPUs: the longest sequence needs {self.fewest}")
        except UserError as error:
            self.journal.message(f"not scaled: {error}")
            return
        self.membership.target = gpus
        self.journal.message(f"scaling to {gpus} ranks")

    def _ledger_after(self, checkpoint: Checkpoint | None) -> Ledger:
        """All batches after a checkpoint, or from the start."""
        done, cursor = (
            (checkpoint.state.step, checkpoint.state.sampler) if checkpoint else (0, None)
        )
        return Ledger(batches(self.job.documents, self.config.train, done=done, cursor=cursor))

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
        self.calibrator.fit()
        return PlanRequest(
            cost=self.calibrator.cost,
            cluster=replace(self.cluster, speeds=self.calibrator.speeds),
            degrees=self.degrees,
            cached=self.communicators.ranks,
            version=self.calibrator.version,
            step_ms=self.calibrator.step_ms,
            errors=tuple(self.calibrator.errors.items()),
        )
