"""Where a rank's time goes within a micro-step: own work apart from waiting for others.

Per-layer parameter collectives make every rank's forward last as long as the slowest group's, so
whole-step times say little about a rank's own work. `own_work` measures a layer between its
parameter waits, forward and backward. On CUDA, spans are pairs of events, read once at the end.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Mark = Any  # seconds as a float, or a torch.cuda.Event


class Stopwatch:
    """Named spans of one micro-step on one device."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._cuda = torch.device(device).type == "cuda"
        self._spans: dict[str, list[tuple[Mark, Mark]]] = defaultdict(list)
        self._open: dict[str, Mark] = {}

    def mark(self) -> Mark:
        """Now, in the device's own time."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self, name: str) -> None:
        """Opens a span that `stop` closes."""
        self._open[name] = self.mark()

    def stop(self, name: str) -> None:
        """Closes a span; without an open one it does nothing."""
        if name in self._open:
            self._spans[name].append((self._open.pop(name), self.mark()))

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Times what runs inside it."""
        start = self.mark()
        yield
        self._spans[name].append((start, self.mark()))

    def read(self) -> dict[str, float]:
        """Milliseconds by name since the last read. On CUDA it waits for the device."""
        if self._cuda:
            torch.cuda.synchronize()
        times = {
            name: sum(_between(start, stop) for start, stop in spans)
            for name, spans in self._spans.items()
        }
        self.clear()
        return times

    def clear(self) -> None:
        """Forgets all spans."""
        self._spans.clear()
        self._open.clear()


def _between(start: Any, stop: Any) -> float:
    """Milliseconds from one mark to another."""
    return (stop - start) * 1e3 if isinstance(start, float) else start.elapsed_time(stop)


def own_work(inner: Callable[..., torch.Tensor], watch: Stopwatch) -> Callable[..., torch.Tensor]:
    """Times `inner` (hidden states [1, S, E], ... to a tensor), forward and backward.

    For a sharded layer, replace its `forward` after `fully_shard`: the hooks that gather and reduce
    parameters run around `forward`. In the backward, autograd runs a tensor's hooks (FSDP gathers
    in the output's) before its node's pre-hooks, and the hook of the layer's input before the
    node that reduces: so the marks lie between the two waits.
    """

    def timed(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if hidden.requires_grad:
            hidden.register_hook(lambda _: watch.stop("own_work"))
        with watch.span("own_work"):
            out = inner(hidden, *args, **kwargs)
        if out.grad_fn is not None:
            out.grad_fn.register_prehook(lambda _: watch.start("own_work"))
        return out

    return timed
