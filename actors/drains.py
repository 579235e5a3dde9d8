"""Nodes that are about to go: a spot notice, `ray drain-node`, an autoscaler's scale-down."""

from __future__ import annotations

import time

LOOK_EVERY_S = 1.0


class Drains:
    """Asks Ray, at most once a second; a node that has begun to drain never comes back."""

    def __init__(self) -> None:
        self._nodes: frozenset[str] = frozenset()
        self._next_look = 0.0

    def nodes(self) -> frozenset[str]:
        """Ray's ids of all nodes that drain or have drained so far."""
        if time.monotonic() >= self._next_look:
            # Ray has no public call for it; this is the one place that needs to change.
            from ray._private.state import state

            self._nodes |= frozenset(state.get_draining_nodes())
            self._next_look = time.monotonic() + LOOK_EVERY_S
        return self._nodes
