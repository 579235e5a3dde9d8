"""Starts `flexray train` as a user does: a process of its own, at a size that ends in seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SMALL = (
    "model.config.num_hidden_layers=1",
    "model.config.hidden_size=32",
    "model.config.intermediate_size=64",
    "data.max_length=256",
)


def environment(ray: str | None = None) -> dict[str, str]:
    """Of a run on the cluster at `ray`, or on a Ray of its own; with a W&B process of its own."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "WANDB_SERVICE")}
    own = {"RAY_AUTH_MODE": "disabled", "WANDB_MODE": "offline", "COLUMNS": "200"}
    return inherited | own | ({"RAY_ADDRESS": ray} if ray else {})


def start(
    folder: Path | None,
    *overrides: str,
    small: bool = True,
    resume: Path | str | None = None,
    profile: str | None = None,
    dry_run: bool = False,
    ray: str | None = None,
) -> subprocess.Popen[str]:
    """`flexray train` with run.dir=`folder` and these overrides, its output in one pipe.

    `ray`: the address of the cluster; without it the run starts one of its own.
    """
    settings = [*([f"run.dir={folder}"] if folder else []), *(SMALL if small else ()), *overrides]
    options = [x for s in settings for x in ("--set", s)]
    options += ["--resume", str(resume)] if resume else []
    options += ["--profile", profile] if profile else []
    options += ["--dry-run"] if dry_run else []
    return subprocess.Popen(
        [sys.executable, "-m", "flexray", "train", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(ray),
        start_new_session=True,  # signals reach only what the test means
    )


def finish(process: subprocess.Popen[str], timeout_s: float = 150) -> tuple[int, str]:
    """Exit code and output. A run that does not end in time is killed."""
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, output


def events(run: Path, kind: str) -> list[dict]:
    """The events of one kind, so far."""
    path = run / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [event for event in map(json.loads, lines) if event["kind"] == kind]
