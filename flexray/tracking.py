"""Weights & Biases, from the driver only. Whatever it does wrong, training goes on.

Usage:
    tracker = Tracker(config, run.path, run.name, warn=display.message)
    tracker.log_step(event, {"plan/speedup": 1.3})
    tracker.finish({"final_loss": 2.1})
"""

from __future__ import annotations

import logging
import netrc
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from flexray.config import Config
from flexray.events import GenerationEvent, StepEvent, ValidationEvent

if TYPE_CHECKING:
    from wandb import Run

Mode = Literal["online", "offline", "disabled"]

# Steps get an axis of their own: W&B's drops what is logged again after a resume.
STEP_AXIS = "train/step"

_START_TIMEOUT_S = float(os.environ.get("WANDB_INIT_TIMEOUT", "30"))
_LOG = logging.getLogger(__name__)


def wandb_mode(wanted: str) -> tuple[Mode, str]:
    """Return the mode that `tracking.wandb` comes to on this machine, and why. Asks no network."""
    if wanted != "auto":
        return wanted, "tracking.wandb"  # type: ignore[return-value]
    if (forced := os.environ.get("WANDB_MODE")) in ("online", "offline", "disabled"):
        return forced, "WANDB_MODE"  # type: ignore[return-value]
    for variable in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        if os.environ.get(variable):
            return "online", f"logged in by {variable}"
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").netloc
    for path in (os.environ.get("NETRC"), "~/.netrc", "~/_netrc"):
        if path and _has_key(Path(path).expanduser(), host):
            return "online", f"logged in by {path}"
    return "offline", "not logged in"


def _has_key(path: Path, host: str) -> bool:
    try:
        entry = netrc.netrc(path).authenticators(host)
    except (OSError, netrc.NetrcParseError):
        return False
    return bool(entry and entry[2])


class Tracker:
    """One W&B run for one run directory, under an id that is kept there for a resume.

    Silent on the terminal but for one warning, when the first call fails; `warn` takes it. Where
    the server is not to be reached at the start the run is offline (`wandb sync` sends it later).
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        run_name: str,
        warn: Callable[[str], None] = _LOG.warning,
        run_id: str | None = None,
    ) -> None:
        """`run_id`: of the W&B run to go on with, where the run directory does not know it."""
        self._run: Run | None = None
        self._warn: Callable[[str], None] | None = warn
        self.mode, _ = wandb_mode(config.tracking.wandb)
        if self.mode == "disabled":
            return
        attempts: tuple[Mode, ...] = (
            ("online", "offline") if self.mode == "online" else ("offline",)
        )
        for self.mode in attempts:
            with self._harmless():
                self._run = _start(config, run_dir, run_name, self.mode, run_id)
                break

    @property
    def run_id(self) -> str | None:
        """Of the W&B run, for a resume; None without one."""
        return self._run.id if self._run else None

    @property
    def url(self) -> str | None:
        """Where the run is to be seen, if it is online."""
        return self._run.url if self._run and self.mode == "online" else None

    def log_step(self, event: StepEvent, extra: Mapping[str, float] | None = None) -> None:
        """Log one step and what else is measured of it, at x = `event.step`."""
        if self._run is None:
            return
        metrics = {
            STEP_AXIS: event.step,
            "train/loss": event.loss,
            "train/tokens": event.tokens,
            "train/label_tokens": event.label_tokens,
            "train/sequences": len(event.rows),
            "train/tokens_per_s": event.tokens / event.step_s if event.step_s > 0 else None,
            "time/step_s": event.step_s,
            "time/planned_s": event.planned_s,
            "time/plan_wait_s": event.plan_wait_s,
            "plan/solve_s": event.solve_s,
            "plan/lower_bound_s": event.lower_bound_s,
            "plan/micro_steps": len(event.groups),
            "plan/groups": sum(map(len, event.groups)),
            "membership/generation": event.generation,
            "train/learning_rate": event.learning_rate,
            "train/skipped": int(event.skipped),
        }
        with self._harmless():
            self._run.log({k: v for k, v in (metrics | dict(extra or {})).items() if v is not None})

    def log_validation(self, event: ValidationEvent) -> None:
        """Log the loss on held-out rows, at x = `event.step`."""
        if self._run is None:
            return
        with self._harmless():
            self._run.log({STEP_AXIS: event.step, "validation/loss": event.loss})

    def log_generation(self, event: GenerationEvent) -> None:
        """Log a membership and what its forming took, at x = the step that it begins with."""
        if self._run is None:
            return
        with self._harmless():
            self._run.log(
                {
                    STEP_AXIS: event.at_step,
                    "membership/generation": event.generation,
                    "membership/world": event.world,
                    "membership/pause_s": event.pause_s,
                    "membership/steps_again": event.steps_again,
                    "membership/cause": event.cause,
                    "memory/copies_mb": event.copies_mb,
                }
            )

    def finish(self, summary: Mapping[str, Any] | None = None) -> None:
        """Write the summary and end the W&B run; more than once does no harm."""
        if self._run is None:
            return
        run, self._run = self._run, None
        with self._harmless():
            run.summary.update(dict(summary or {}))
        with self._harmless():
            run.finish()

    @contextmanager
    def _harmless(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if self._warn:
                message = " ".join(str(error).split())
                self._warn(f"Weights & Biases failed, training goes on: {message}")
                self._warn = None


def _start(config: Config, run_dir: Path, run_name: str, mode: Mode, run_id: str | None) -> Run:
    import wandb

    id_file = run_dir / "wandb_run_id"
    known = id_file.read_text().strip() if id_file.exists() else run_id
    run = wandb.init(
        project=config.tracking.project,
        name=run_name,
        id=known,
        resume="allow" if known and mode == "online" else None,
        dir=run_dir,
        mode=mode,
        config=config.to_dict(),
        settings=wandb.Settings(silent=True, console="off", init_timeout=_START_TIMEOUT_S),
    )
    id_file.write_text(f"{run.id}\n")
    run.define_metric(STEP_AXIS)
    run.define_metric("*", step_metric=STEP_AXIS)
    return run
