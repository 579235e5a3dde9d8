"""Ctrl-C and SIGTERM: while steps run they end the run after the step, with a checkpoint."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Whether the run is to end after the present step; a context manager that hears signals.

    Before `heard` is set (nothing is trained yet) a signal ends the run at once, and so does a
    second one after it: KeyboardInterrupt. A third changes nothing: the clean-up is not broken off.
    Outside the main thread no signal is heard and `request` is the only way.
    """

    def __init__(self) -> None:
        self.requested = False
        self.heard: Callable[[], None] | None = None
        self._before: dict[signal.Signals, Any] = {}

    def request(self) -> None:
        """The run is to end after the present step. From any thread."""
        self.requested = True

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.heard is None or self.requested:
            for each in SIGNALS:
                signal.signal(each, signal.SIG_IGN)
            raise KeyboardInterrupt
        self.requested = True
        with suppress(RuntimeError):  # the signal may have come while a line was being printed
            self.heard()
