"""Training from Python; `flexray train` is a thin skin of it.

Usage:
    from flexray import Callback, Trainer

    class Loss(Callback):
        def on_step(self, event):
            print(event.step, event.loss)

    result = Trainer({"train": {"steps": 100}}, callbacks=[Loss()]).train()
    Trainer(resume=result.path, overrides=["train.steps=200"]).train()
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexray.callbacks import Callback, Callbacks
from flexray.checkpoints import Checkpoint, CheckpointFolder
from flexray.config import Config, load_config
from flexray.datasets.errors import CorpusError
from flexray.display import Display
from flexray.driver import Driver, State
from flexray.errors import UserError
from flexray.preparation import prepare
from flexray.profiling import Steps
from flexray.resume import check_newest, check_unchanged, locate, run_folder
from flexray.run_directory import RunDirectory
from flexray.scaling import check_scale
from flexray.solver.plan import PlanningError
from flexray.stopping import StopRequest

if TYPE_CHECKING:
    from flexray.actors.loss import TokenLoss
    from flexray.actors.model import ModelFactory


@dataclass(frozen=True)
class TrainResult:
    """How training ended.

    Attributes:
        path: the run's folder.
        steps: done in all, those before a resume included.
        loss: of the last step trained here; not a number without one.
        stopped: it was told to stop before the last step of the config; there is a checkpoint of
            step `steps`, unless that is 0.
    """

    path: Path
    steps: int
    loss: float
    stopped: bool


class Trainer:
    """One run."""

    def __init__(
        self,
        config: Config | Mapping[str, Any] | str | Path | None = None,
        model: ModelFactory | None = None,
        loss: TokenLoss | None = None,
        callbacks: Sequence[Callback] = (),
        *,
        resume: str | Path | None = None,
        overrides: Sequence[str] = (),
        profile: str | None = None,
        display: Display | None = None,
    ) -> None:
        """Reads and checks what can be without a model or a cluster.

        Args:
            config: A `Config`, sections as a mapping, a YAML file, or None: all defaults, or what
                the resumed run had.
            model: Makes the model from its Hugging Face configuration, on every rank.
            loss: Wide logits [T, V] and labels [T] to each token's loss [T], instead of cross
                entropy.
            callbacks: Called in this process.
            resume: A run's folder or its name, or a folder or URL of checkpoints, to go on with.
            overrides: `section.key=value` over the config.
            profile: Steps such as "5:8" to trace on every rank.
            display: Where the run is shown; None: on stdout.

        Raises:
            UserError: in one line, what is wrong and what to do.
        """
        self.resume: Checkpoint | None = None
        if resume is None:
            self.config = _read(config, overrides)
        else:
            # The saved config is not known yet, and the other overrides are over that.
            runs = _read(config, [o for o in overrides if o.startswith("run.dir=")]).run.dir
            self.resume = locate(str(resume), runs)
            saved = self.resume.state.config
            self.config = _of_run(
                _read(saved if config is None else config, overrides),
                saved,
                run_folder(str(resume), runs),
            )
            check_unchanged(saved, self.config)
            if self.resume.state.step >= self.config.train.steps:
                raise UserError(
                    f"{self.resume.location}: all {self.config.train.steps} steps are done: for "
                    "more, give a larger train.steps"
                )
        # Known to be a place for checkpoints before a run's folder is made.
        CheckpointFolder.of(self.config, self.config.run.dir / (self.config.run.name or "run"))
        self._profile = Steps.parse(profile) if profile else None
        if self._profile:
            done = self.resume.state.step if self.resume else 0
            self._profile.check(done, self.config.train.steps)
        self._model, self._loss, self._callbacks = model, loss, Callbacks(callbacks)
        self._display = display
        self._stop = StopRequest()
        self._driver: Driver | None = None

    @property
    def steps_done(self) -> int:
        """Steps that are trained and written down so far."""
        return self._driver.journal.steps_done if self._driver else 0

    @property
    def path(self) -> Path | None:
        """The run's folder, once it is there."""
        return self._driver.run.path if self._driver else None

    def checkpoints(self) -> list[int]:
        """Steps with a whole checkpoint, ascending."""
        return self._driver.checkpoints.steps() if self._driver else []

    def train(self) -> TrainResult:
        """Trains to the last step, or until `stop`, Ctrl-C or SIGTERM.

        Raises UserError, CorpusError or PlanningError for what the user can put right, RunFailed
        when the run cannot go on, KeyboardInterrupt when it was told to stop at once.
        """
        if self._display is not None:
            return self._train(self._display)
        with Display() as display:
            return self._train(display)

    def stop(self) -> None:
        """Ends training after the steps under way, with a checkpoint. From any thread."""
        self._stop.request()

    def scale(self, gpus: int) -> None:
        """Asks for another number of ranks, from the next step on. From any thread.

        Raises UserError for a number that the config does not allow, or before `train` has begun.
        """
        check_scale(self.config.cluster, gpus)
        if self._driver is None:
            raise UserError("scale: this run is not training yet")
        self._driver.scaling.ask(gpus)

    def _train(self, display: Display) -> TrainResult:
        job = prepare(self.config, self._model, self._loss)
        run = self._directory()
        with run.held():
            if self.resume:  # it was read before the run was held
                check_newest(self.resume, self.config, run)
            driver = self._driver = Driver(
                job,
                run,
                display,
                resume=self.resume,
                callbacks=self._callbacks,
                profile=self._profile,
                stop=self._stop,
            )
            try:
                driver.train()
            except (UserError, CorpusError, PlanningError):
                if not self.resume and not driver.journal.steps_done:
                    shutil.rmtree(run.path, ignore_errors=True)  # the name stays free
                raise
        steps, loss = driver.journal.steps_done, driver.journal.loss
        return TrainResult(run.path, steps, loss, stopped=driver.state is State.STOPPED)

    def _directory(self) -> RunDirectory:
        section = self.config.run
        if self.resume:
            return RunDirectory.open(section.dir, str(section.name))
        run = RunDirectory.create(section.dir, section.name)
        folder = CheckpointFolder.of(self.config, run.path)
        try:
            if folder.steps():
                raise UserError(
                    f"{folder.root}: holds checkpoints of a run of this name: choose another "
                    "run.name, or go on with it by --resume"
                )
        except UserError:
            run.path.rmdir()  # the name stays free
            raise
        return run


def _read(
    config: Config | Mapping[str, Any] | str | Path | None, overrides: Sequence[str]
) -> Config:
    if isinstance(config, Config):
        config = config.to_dict()
    return load_config(Path(config) if isinstance(config, str) else config, list(overrides))


def _of_run(config: Config, saved: dict[str, Any], folder: Path | None) -> Config:
    """`config` with the name and folder of the run that is resumed.

    Its folder may have been renamed. Raises UserError for another name.
    """
    name = saved["run"]["name"]
    if config.run.name not in (None, name):
        raise UserError(
            f"run.name is {config.run.name} and the run to go on with is {name}: leave run.name out"
        )
    run: dict[str, Any] = {"name": name}
    if folder is not None:
        run = {"name": folder.name, "dir": folder.parent}
    return config.model_copy(update={"run": config.run.model_copy(update=run)})
