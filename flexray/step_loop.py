"""Works through batches with one generation of ranks.

The next step is queued on every actor before the present one ends, so that no rank waits for the
driver. A step is committed, and only then written down, when every rank's state after it is known
to be in another rank's memory too (design: the return of any later collective says so).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from flexray.actors.crew import PoolError
from flexray.actors.pool import Generation, Pool
from flexray.actors.work import EvaluationReport, RankStep, StepReport, slices
from flexray.batches import Batch
from flexray.checkpoints import RunState
from flexray.journal import Journal
from flexray.ledger import Ledger
from flexray.nonfinite import NonfinitePolicy
from flexray.prefetch import PlannedBatch
from flexray.profiling import Profiler
from flexray.records import step_spans
from flexray.saving import Saver
from flexray.solver.calibration import Calibrator
from flexray.solver.communicators import CommunicatorCache
from flexray.validation import ValidationSum


@dataclass(frozen=True)
class InFlight:
    """Work that the actors have been sent."""

    planned: PlannedBatch
    calls: list[Any]  # one a rank; none for a batch without a label token
    is_copied: bool  # each rank's state after it goes to its buddy

    @property
    def batch(self) -> Batch:
        """What it works on."""
        return self.planned.batch


class StepLoop:
    """One generation's work."""

    def __init__(
        self,
        pool: Pool,
        generation: Generation,
        prefetch: Iterable[PlannedBatch],
        communicators: CommunicatorCache,
        *,
        ledger: Ledger,
        journal: Journal,
        saver: Saver,
        profiler: Profiler,
        nonfinite: NonfinitePolicy,
        calibrator: Calibrator,
        state_after: Callable[[Batch], RunState],
        save_every: int | None,
        copy_every: int,
    ) -> None:
        """`state_after` a batch is what a checkpoint keeps beside the ranks' state."""
        self.pool, self.generation, self.prefetch = pool, generation, prefetch
        self.communicators = communicators
        self.ledger, self.journal, self.saver, self.profiler = ledger, journal, saver, profiler
        self.nonfinite, self.calibrator, self.state_after = nonfinite, calibrator, state_after
        self.save_every, self.copy_every = save_every or 0, copy_every
        self.in_flight: deque[InFlight] = deque()
        self.validation = ValidationSum()
        self.copied = 0  # the last step whose copies are under way, and are there by the next work
        self.first_step: int | None = None  # of this generation
        self.holds_saves = False  # another generation is due when what is being written is whole

    def run(self, is_over: Callable[[], bool]) -> bool:
        """Until there are no more batches, or until `is_over` between two steps.

        Returns whether there are no more. All that was sent is complete then. Raises PlanningError
        for a batch that these ranks cannot hold, and Broken when the generation is over.
        """
        last = self.ledger.committed
        for planned in self.prefetch:
            if not planned.batch.held_out and is_over():  # a validation is not broken off
                self.complete_all()
                return False
            self.in_flight.append(self._dispatch(planned))
            while len(self.in_flight) > 1:
                self._complete()
            if not planned.batch.held_out:
                last = planned.batch
            if last and planned.batch.ends_step:
                self._save_if_due(last)
        self.complete_all()
        return True

    def complete_all(self) -> None:
        """Waits for all that was sent."""
        while self.in_flight:
            self._complete()

    def settle(self) -> None:
        """Commits all that is done, with copies of it; nothing is in flight."""
        step = self.ledger.newest_done or self.journal.steps_done
        self.pool.settle(step)
        self._commit(step)

    @property
    def begun(self) -> int:
        """The newest step that has begun."""
        first = [work.batch.step for work in self.in_flight if not work.batch.held_out][:1]
        return max([self.ledger.newest_done or self.journal.steps_done, *first])

    @property
    def largest_share(self) -> int:
        """Tokens that a rank gets at most in the work that is under way."""
        packs = (
            group
            for work in self.in_flight
            for micro_step in work.planned.plan.micro_steps
            for group in micro_step.groups
        )
        return max((-(-pack.tokens // pack.degree) for pack in packs), default=0)

    def rescue(self, step: int) -> None:
        """Commits up to `step` after the generation is over, from what was still reported.

        Raises PoolError when nobody reports a step that was made.
        """
        while any(not w.batch.held_out and w.batch.step <= step for w in self.in_flight):
            work = self.in_flight.popleft()
            reports = self.pool.answered(work.calls)
            if work.calls and not reports:
                raise PoolError(f"step {work.batch.step} was made and nobody reports it")
            # All survivors have made it; one report has all that is written down.
            self._take(work, reports)
        self._commit(step)

    def _dispatch(self, planned: PlannedBatch) -> InFlight:
        batch = planned.batch
        if self.in_flight and self.pool.is_busy(self.in_flight[-1].calls):
            planned = replace(planned, waited_s=0.0)  # no rank has waited for it
        # Before a validation and a checkpoint too: they count on a step that is committed.
        is_copied = (
            batch.step % self.copy_every == 0 or not batch.ends_step or self._is_to_be_saved(batch)
        )
        work = self._slices(planned, is_copied)
        if batch.held_out:
            return InFlight(planned, self.pool.evaluate(work) if work else [], False)
        self.profiler.before(batch.step)
        calls = self.pool.dispatch(work) if work else []
        self.profiler.after(batch.step)
        return InFlight(planned, calls, is_copied and bool(calls))

    def _slices(self, planned: PlannedBatch, is_copied: bool) -> list[RankStep]:
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
            snapshot=is_copied,
        )

    def _complete(self) -> None:
        """Waits for the oldest work that was sent."""
        work = self.in_flight[0]
        reports = self.pool.wait(work.calls, "validation" if work.batch.held_out else "step")
        self.in_flight.popleft()
        self._take(work, reports)
        if not work.batch.held_out and (written := self.profiler.done(work.batch.step)):
            self.journal.message(written)
        # Not before all of its step is written down: a resume would leave out the rest.
        if work.batch.ends_step:
            self.journal.checkpoints(self.saver.poll(self.journal.steps_done))

    def _take(self, work: InFlight, reports: list[Any]) -> None:
        """Takes in what ranks report of work that they have done."""
        if reports:  # a collective has returned since the copies of this step were sent
            self._commit(self.copied)
        if work.batch.held_out:
            self._take_validation(work.batch, reports)
        else:
            self._take_step(work, reports)

    def _take_step(self, work: InFlight, reports: list[StepReport]) -> None:
        step = work.batch.step
        self.ledger.done(self.journal.done(work.planned, reports, self.generation.number))
        if self.generation.world == 1:  # there is nobody to keep a copy
            self._commit(step)
        if work.is_copied:
            self.copied = step
        if self.first_step is None:
            self.first_step = step
        if step > self.first_step and reports:  # first calls teach nothing
            self.calibrator.observe(step_spans(reports))

    def _take_validation(self, batch: Batch, reports: list[EvaluationReport]) -> None:
        self.validation.add(batch, reports)
        if batch.ends_step:
            self.journal.validation(self.validation.event(batch.step))
            self.ledger.looked_at(batch)
            self.validation = ValidationSum()

    def _commit(self, step: int) -> None:
        for done in self.ledger.commit(step):
            self.journal.commit(done)
            self.nonfinite.check(done.reports)

    def _save_if_due(self, batch: Batch) -> None:
        if not self._is_to_be_saved(batch) or self.holds_saves:
            return
        if self.saver.step is not None:  # it is still being written: wait
            self.complete_all()
            if self.saver.step is not None and self.saver.step > self.journal.steps_done:
                self.settle()
            self.journal.checkpoints(self.saver.finish(self.journal.steps_done))
        self.journal.checkpoints(self.saver.start(self.state_after(batch)))

    def _is_to_be_saved(self, batch: Batch) -> bool:
        return self.save_every > 0 and batch.step % self.save_every == 0
