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


def start(
    folder: Path | None,
    *overrides: str,
    small: bool = True,
    resume: Path | str | None = None,
    profile: str | None = None,
    dry_run: bool = False,
) -> subprocess.Popen[str]:
    """`flexray train` with run.dir=`folder` and these overrides, its output in one pipe."""
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
        env=os.environ | {"RAY_AUTH_MODE": "disabled", "WANDB_MODE": "offline", "COLUMNS": "200"},
        start_new_session=True,  # signals reach only what the test means
    )


def finish(process: subprocess.Popen[str], timeout_s: float = 150) -> tuple[int, str]:
    """Exit code and output."""
    output, _ = process.communicate(timeout=timeout_s)
    return process.returncode, output


def events(run: Path, kind: str) -> list[dict]:
    """The events of one kind, so far."""
    path = run / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [event for event in map(json.loads, lines) if event["kind"] == kind]
