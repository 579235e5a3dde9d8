"""Finds actors that live and do not answer: a stopped process closes no socket."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import ray


class Pulse:
    """Asks actors for a sign of life, each at most one at a time."""

    def __init__(self, limit_s: float) -> None:
        """`limit_s`: how long an actor may be silent."""
        self.limit_s = limit_s
        self._asked: dict[int, tuple[Any, float]] = {}

    def silent(self, actors: Mapping[int, Any]) -> list[int]:
        """Those of `actors` that have not answered for too long. Call it again and again."""
        self._asked = {actor: asked for actor, asked in self._asked.items() if actor in actors}
        return [actor for actor, handle in actors.items() if self._is_silent(actor, handle)]

    def _is_silent(self, actor: int, handle: Any) -> bool:
        if actor not in self._asked:
            self._asked[actor] = handle.pulse.remote(), time.monotonic()
            return False
        call, since = self._asked[actor]
        is_late = time.monotonic() - since > self.limit_s
        # This process may have been busy itself: one more chance for an answer under way.
        answered, _ = ray.wait([call], timeout=1.0 if is_late else 0.0)
        if answered:  # or it is dead, which its other calls tell
            del self._asked[actor]
            return False
        return is_late
