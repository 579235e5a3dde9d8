"""Actors for the benchmark of training: ranks with a core each, and ranks that emulate compute.

An emulated rank does all that a rank does (its rows, communicators, all-to-alls, copies of its
state, reports) but for the model's own work: for so long as a cost model says it sleeps.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import psutil
import ray
import torch
import torch.distributed as dist

from flexray.actors.engine import Engine
from flexray.actors.gang import Gang
from flexray.actors.pack import EMPTY_PACK, make_shard
from flexray.actors.seat import JoinReport, Seat
from flexray.actors.work import MicroReport, RankMicroStep, RankStep
from flexray.actors.worker import Worker
from flexray.solver.cost import CostModel

EXCHANGES = 2  # forward and backward
Plain: Any = Worker.__ray_metadata__.modified_class  # type: ignore[attr-defined]  # as Ray runs it


@dataclass(frozen=True)
class Emulation:
    """What a rank takes for its own work.

    Attributes:
        cost: of which compute and the fixed cost of a micro-step are slept.
        slow_rank: is half as fast from `slow_from` on, a step; None: all are alike.
    """

    cost: CostModel
    slow_rank: int | None = None
    slow_from: int = 0

    def compute_ms(self, lengths: list[int], degree: int, rank: int, step: int) -> float:
        """A rank's share of a pack of sequences of these lengths."""
        cost = self.cost
        split = sum(cost.quadratic * n * n + cost.linear * n for n in lengths) / degree
        is_slow = rank == self.slow_rank and step >= self.slow_from
        return (split + cost.per_sequence * len(lengths)) * (2 if is_slow else 1)


class EmulatedEngine(Engine):
    """Real collectives, and sleep for compute: it learns nothing."""

    emulation: Emulation

    def _micro_step(
        self, part: RankMicroStep, work: RankStep
    ) -> tuple[torch.Tensor, int, MicroReport]:
        gang = self.gangs.get(part.ranks)
        sequences = [self.read_row(row) for row in part.rows]
        shard = make_shard(sequences or EMPTY_PACK, gang.degree, gang.rank, self.device)
        lengths = [len(tokens) for tokens, _ in sequences]
        compute_ms = self.emulation.compute_ms(lengths, gang.degree, self.rank, work.step)
        self.watch.clear()
        with self.watch.span("all"):
            layers = self.settings.model.num_hidden_layers
            for _ in range(EXCHANGES * layers):
                with self.watch.span("own_work"):
                    time.sleep(compute_ms / 1e3 / (EXCHANGES * layers))
                if gang.degree > 1:
                    self._exchange(gang, len(shard.input_ids[0]))
            # The parameters' collectives: nobody is through before the slowest is.
            dist.all_reduce(torch.zeros(1))
            time.sleep(self.emulation.cost.micro_step_ms / 1e3)
        times = self.watch.read()
        own, exchange = times["own_work"], times.get("all_to_all", 0.0)
        report = MicroReport(
            degree=gang.degree,
            tokens=sum(lengths),
            squares=sum(n * n for n in lengths),
            sequences=len(lengths),
            forward_ms=times["all"],
            backward_ms=0.0,
            own_work_ms=own,
            all_to_all_ms=exchange,
            wait_ms=times["all"] - own - exchange,
        )
        return torch.zeros(()), shard.label_tokens, report

    def _exchange(self, gang: Gang, tokens: int) -> None:
        """The all-to-alls of a layer of the model in one direction, as ulysses.py makes them."""
        model, degree = self.settings.model, gang.degree
        width = model.hidden_size // model.num_attention_heads
        kv_heads = max(model.num_key_value_heads, degree)
        for heads in (model.num_attention_heads + 2 * kv_heads, model.num_attention_heads):
            gang.all_to_all(torch.zeros(degree, tokens, heads // degree * width))

    def update(self) -> float:
        """There are no gradients."""
        self.updates += 1
        return 1.0


def emulated(emulation: Emulation) -> Any:
    """The class of actors that emulate compute."""

    class Emulated(EmulatedEngine):
        pass

    class EmulatedWorker(Plain):
        engine_class = Emulated

    Emulated.emulation = emulation
    return _remote(EmulatedWorker)


def pinned() -> Any:
    """The class of actors that train, each on a core of its own."""

    class PinnedWorker(Plain):
        def _join(self, seat: Seat) -> JoinReport:
            pin(seat.rank)
            return super()._join(seat)

    return _remote(PinnedWorker)


def pin(number: int) -> None:
    """Every thread of this process to the core of this number, of those that it may use."""
    cores = sorted(os.sched_getaffinity(os.getppid()))
    for thread in psutil.Process().threads():
        os.sched_setaffinity(thread.id, {cores[number % len(cores)]})


def _remote(worker: type) -> Any:
    groups = {"train": 1, "control": 1, "storage": 1}
    return ray.remote(max_restarts=0, concurrency_groups=groups)(worker)
