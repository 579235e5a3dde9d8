"""What of yours runs in the driver while a run goes on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from flexray.errors import RunFailed
from flexray.events import GenerationEvent, StepEvent


class Callback:
    """Override what you want to hear of. Ranks wait for nothing here, the next plan does.

    An error in a callback ends the run, with one line that names it.
    """

    def on_step(self, event: StepEvent) -> None:
        """A step is done on all ranks. Where one dies it may be undone, and is heard of again."""

    def on_commit(self, step: int) -> None:
        """`step` is written down, and survives the death of any one rank."""

    def on_generation(self, event: GenerationEvent) -> None:
        """A membership was formed."""


class Callbacks:
    """Calls them in turn. Raises RunFailed, from the error, when one fails."""

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        self._callbacks = tuple(callbacks)

    def step(self, event: StepEvent) -> None:
        """A step that is done."""
        for callback in self._callbacks:
            with _named(callback, "on_step", f"step {event.step}"):
                callback.on_step(event)

    def commit(self, step: int) -> None:
        """A step that is committed."""
        for callback in self._callbacks:
            with _named(callback, "on_commit", f"step {step}"):
                callback.on_commit(step)

    def generation(self, event: GenerationEvent) -> None:
        """A membership was formed."""
        for callback in self._callbacks:
            with _named(callback, "on_generation", f"generation {event.generation}"):
                callback.on_generation(event)


@contextmanager
def _named(callback: Callback, method: str, when: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise RunFailed(f"{type(callback).__name__}.{method} failed at {when}: {why}") from error
