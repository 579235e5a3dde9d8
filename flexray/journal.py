"""What is told of a run: events.jsonl, plans.jsonl, Weights & Biases, the display, callbacks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

from flexray.actors.pool import Generation
from flexray.actors.work import StepReport
from flexray.callbacks import Callbacks
from flexray.checkpoints import Checkpoint
from flexray.config import Config
from flexray.datasets.mixture import Mixture
from flexray.display import Display, StepView
from flexray.events import (
    Cause,
    CheckpointEvent,
    DataEvent,
    EventLog,
    GenerationEvent,
    PlanLog,
    ResumeEvent,
    ValidationEvent,
)
from flexray.ledger import Done
from flexray.prefetch import PlannedBatch
from flexray.records import model_events, step_event, step_metrics
from flexray.resume import cut_logs
from flexray.run_directory import RunDirectory
from flexray.tracking import Tracker


class Journal:
    """Writes one run down, from `first_step` on; a context manager that closes what it opened."""

    def __init__(
        self,
        config: Config,
        run: RunDirectory,
        display: Display,
        callbacks: Callbacks,
        resume: Checkpoint | None,
    ) -> None:
        """Takes out of the logs what came after the checkpoint that the run goes on from."""
        self.steps_done = resume.state.step if resume else 0
        self.first_step = self.steps_done + 1
        self.loss = math.nan
        self._model_version = -1  # of the last step that was written down
        self.state = "initializing"
        self._config, self._run, self._display = config, run, display
        self._callbacks = callbacks
        # Of a resumed run not before its first checkpoint: the config says where the newest is.
        self._config_is_due = resume is not None and run.config_path.exists()
        if not self._config_is_due:
            run.write_config(config)
        lost, self.last_generation = cut_logs(run, self.steps_done)
        self._events, self._plans = EventLog(run.events_path), PlanLog(run.plans_path)
        known = resume.state.wandb_run_id if resume else None
        self._tracker = Tracker(config, run.path, run.name, display.message, known)
        if resume:
            self._events.write(
                ResumeEvent(location=resume.location, at_step=self.first_step, lost_steps=lost)
            )
            again = f"; {lost} steps after it are trained again" if lost else ""
            display.message(f"Going on after step {self.steps_done} from {resume.location}{again}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        state = self.state if kind is None else "failed"
        self._tracker.finish({"state": state, "steps": self.steps_done, "final_loss": self.loss})
        self._events.close()
        self._plans.close()

    @property
    def wandb_run_id(self) -> str | None:
        """Of the Weights & Biases run, if there is one."""
        return self._tracker.run_id

    def message(self, text: str) -> None:
        """A line for the user."""
        self._display.message(text)

    def data(self, documents: Mixture) -> None:
        """What the over-length policy did to each corpus."""
        for part in documents.parts:
            self._events.write(DataEvent(corpus=str(part.corpus.path), **vars(part.report)))
        for line in describe_data(documents):
            self.message(line)

    def generation(
        self, generation: Generation, cause: Cause, *, pause_s: float, steps_again: int
    ) -> None:
        """A membership that was formed, for how long nothing was trained, what is trained again."""
        joined = generation.joined
        event = GenerationEvent(
            generation=generation.number,
            world=generation.world,
            pids=[place.pid for place in generation.places],
            nodes=[place.node for place in generation.places],
            cause=cause,
            pause_s=pause_s,
            at_step=self.steps_done + 1,
            steps_again=steps_again,
            form_s=max(report.form_s for report in joined),
            build_s=max(report.build_s for report in joined),
            restore_s=max(report.restore_s for report in joined),
            moved_mb=sum(report.received_mb for report in joined),
            copies_mb=max(report.copies_mb for report in joined),
        )
        self._events.write(event)
        self._tracker.log_generation(event)
        if cause != "start":
            again = f", {steps_again} step{'s'[: steps_again != 1]} again" if steps_again else ""
            self.message(
                f"generation {event.generation} ({cause}): {event.world} ranks from step "
                f"{event.at_step}{again}, after {pause_s:.1f} s"
            )
        self._callbacks.generation(event)

    def done(self, planned: PlannedBatch, reports: Sequence[StepReport], generation: int) -> Done:
        """A step that is done, and not committed yet."""
        is_first = planned.batch.step == self.first_step
        event = step_event(planned, reports, generation, is_first=is_first)
        self._callbacks.step(event)
        return Done(planned, reports, event)

    def commit(self, done: Done) -> None:
        """A step that nothing undoes any more: it is written down."""
        event, planned = done.event, done.planned.bounded()
        event = dataclasses.replace(event, lower_bound_s=planned.plan.lower_bound_ms / 1e3)
        self.steps_done, self.loss = event.step, event.loss
        for learned in model_events(planned, self._model_version):
            self._events.write(learned)
        self._model_version = event.model_version
        self._events.write(event)
        self._plans.write(event.step, event.generation, planned.plan)
        self._tracker.log_step(event, step_metrics(planned, done.reports))
        self._display.step(StepView.of(event, planned, self._config.train.steps))
        self._callbacks.commit(event.step)

    def back_to(self, step: int, location: str) -> None:
        """Takes out what came after `step`: it is trained again from there."""
        self._events.close()
        self._plans.close()
        lost, _ = cut_logs(self._run, step, only=("step", "validation"))
        self._events, self._plans = EventLog(self._run.events_path), PlanLog(self._run.plans_path)
        self.steps_done = step
        self._events.write(ResumeEvent(location=location, at_step=step + 1, lost_steps=lost))

    def validation(self, event: ValidationEvent) -> None:
        """Held-out rows were looked at."""
        self._events.write(event)
        self._tracker.log_validation(event)
        self.message(
            f"validation after step {event.step}: loss {event.loss:.4f} over "
            f"{event.label_tokens:,} tokens of {event.sequences:,} sequences"
        )

    def checkpoints(self, ended: Sequence[CheckpointEvent | str]) -> None:
        """How checkpoints ended: events, and lines that say what went wrong."""
        for end in ended:
            if isinstance(end, str):
                self.message(end)
                continue
            self._events.write(end)
            self.message(f"checkpoint of step {end.step}: {end.location}")
            if self._config_is_due:
                self._run.write_config(self._config)
                self._config_is_due = False


def describe_data(documents: Mixture) -> Iterator[str]:
    """What is trained on, a line for each corpus."""
    for part in documents.parts:
        report = part.report
        yield (
            (f"{part.corpus.path.name}: " if len(documents.parts) > 1 else "")
            + f"{report.rows:,} sequences of up to {int(part.lengths.max()):,} tokens"
            + (f"; {report.split_rows:,} longer ones split" if report.split_rows else "")
            + (f"; {report.dropped_rows:,} longer ones dropped" if report.dropped_rows else "")
            + (f"; {report.truncated_rows:,} longer ones cut" if report.truncated_rows else "")
            + (f"; {report.lost_tokens:,} tokens lost" if report.lost_tokens else "")
        )
    if held_out := len(documents.validation_rows):
        yield f"{held_out:,} of these are held out for validation"
