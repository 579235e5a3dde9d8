"""A torch profiler's trace of one rank."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


class Profile:
    """Records from its making until `stop` or `drop`; all in the thread that trains."""

    def __init__(self, device: torch.device) -> None:
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profiler = profile(activities=activities)
        self._profiler.start()

    def drop(self) -> None:
        """Stops, and forgets what was recorded."""
        self._profiler.stop()

    def stop(self) -> bytes:
        """Chrome's trace format (chrome://tracing, ui.perfetto.dev), JSON."""
        self._profiler.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profiler.export_chrome_trace(str(path))
            return path.read_bytes()
