"""The training engine of one rank: model, gangs, step. It knows no Ray.

A step is M micro-steps (forward, backward, gradients summed over the world), then one optimizer
step. How ranks are grouped changes from micro-step to micro-step and never the result.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from itertools import chain

import torch
import torch.distributed as dist

from flexray.actors.attention.backends import choose_backend
from flexray.actors.attention.ulysses import SequenceParallel
from flexray.actors.gang import GangCache
from flexray.actors.lora import add_adapters, random_adapters
from flexray.actors.loss import LossModel
from flexray.actors.mesh import parameter_mesh
from flexray.actors.model import build_on_meta
from flexray.actors.optimizer import adamw, clip
from flexray.actors.pack import EMPTY_PACK, Tokens, make_shard
from flexray.actors.settings import EngineSettings
from flexray.actors.sharding import fill, initial_parameters, reshard, shard
from flexray.actors.timing import Stopwatch
from flexray.actors.work import (
    EvaluationReport,
    MicroReport,
    RankMicroStep,
    RankStep,
    StepReport,
)

ReadRow = Callable[[int], Tokens]


class StaleGeneration(RuntimeError):
    """A call for a membership that is over."""


class StepMismatch(RuntimeError):
    """What the ranks read is not what the driver planned."""


class Engine:
    """One rank of one generation."""

    def __init__(
        self,
        settings: EngineSettings,
        read_row: ReadRow,
        *,
        store: dist.Store,
        generation: int,
        rank: int,
        world: int,
        device: torch.device | str = "cpu",
    ) -> None:
        """Joins the world of this generation (a collective call) and builds the sharded model.

        `store` is shared by all ranks; every generation has its own prefix in it.
        """
        self.settings = settings
        self.read_row = read_row
        self.generation, self.rank, self.world = generation, rank, world
        self.device = torch.device(device)
        self.backend = choose_backend(settings.attention, settings.compute_dtype, self.device)
        self.watch = Stopwatch(self.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        store = dist.PrefixStore(f"generation{generation}", store)
        dist.init_process_group(
            "nccl" if self.device.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=settings.timeout_s),
        )
        self.gangs = GangCache(rank, store, self.device, settings.timeout_s, self.watch)
        self.updates = 0  # made; none without a label or with a norm that is not finite
        self._ended: float | None = None
        try:
            self.model = self._build()
            self.optimizer = adamw(
                self.model.parameters(), betas=settings.betas, weight_decay=settings.weight_decay
            )
        except BaseException:
            self.leave()
            raise

    def run_step(self, work: RankStep) -> StepReport:
        """One whole step: micro-steps, clipping, optimizer.

        Raises StaleGeneration for another generation's work and StepMismatch when the ranks
        together read another number of label tokens than planned; both change nothing.
        """
        self._check_generation(work)
        started = time.perf_counter()
        idle = 0.0 if self._ended is None else started - self._ended
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        made = self.gangs.apply(work.changes)
        rate = self.settings.learning_rate_of(self.updates + 1)
        loss, reports = self.accumulate(work)
        norm = self.update() if work.label_tokens else 0.0
        self._ended = time.perf_counter()
        return StepReport(
            step=work.step,
            generation=self.generation,
            rank=self.rank,
            loss=loss,
            gradient_norm=norm,
            learning_rate=rate,
            skipped=not math.isfinite(norm),
            micro_steps=tuple(reports),
            new_communicators=made,
            step_ms=(self._ended - started) * 1e3,
            idle_ms=idle * 1e3,
            peak_memory_mb=self._peak_memory_mb(),
        )

    def evaluate(self, work: RankStep) -> EvaluationReport:
        """The mean loss of `work` without training: parameters, gradients and counters stay.

        Raises StaleGeneration and StepMismatch as `run_step` does.
        """
        self._check_generation(work)
        started = time.perf_counter()
        made = self.gangs.apply(work.changes)
        with torch.no_grad():
            parts = [self._forward(part, work)[:2] for part in work.micro_steps]
        reshard(self.model)
        loss = self._sum(work, parts)
        self._ended = time.perf_counter()
        return EvaluationReport(
            step=work.step,
            generation=self.generation,
            rank=self.rank,
            loss=loss,
            label_tokens=work.label_tokens,
            new_communicators=made,
            wall_ms=(self._ended - started) * 1e3,
        )

    def accumulate(self, work: RankStep) -> tuple[float, list[MicroReport]]:
        """Runs the micro-steps: gradients of the step's mean loss, summed over ranks, in `.grad`.

        Returns the step's loss (the same on every rank) and this rank's reports.
        """
        self.optimizer.zero_grad()
        parts, reports = [], []
        for number, micro_step in enumerate(work.micro_steps, 1):
            # Gradients of replicas are summed once, when the last ones are there.
            self.model.set_requires_all_reduce(number == len(work.micro_steps))
            loss, label_tokens, report = self._micro_step(micro_step, work)
            parts.append((loss, label_tokens))
            reports.append(report)
        try:
            return self._sum(work, parts), reports
        except StepMismatch:
            self.optimizer.zero_grad()
            raise

    def update(self) -> float:
        """Clips by the global norm and makes one optimizer step, unless the norm is not finite.

        Returns the norm before clipping. Every rank has the same, and so decides the same.
        """
        norm = clip(self.model.parameters(), self.settings.clip_norm)
        if math.isfinite(norm):
            for group in self.optimizer.param_groups:
                group["lr"] = self.settings.learning_rate_of(self.updates + 1)
            self.optimizer.step()
            self.updates += 1
        self.optimizer.zero_grad()
        return norm

    def counters(self) -> dict[str, int]:
        """What a checkpoint keeps beside parameters and optimizer state; same on every rank."""
        return {"updates": self.updates}

    def set_counters(self, counters: Mapping[str, int]) -> None:
        """Goes on from what `counters` returned. Raises KeyError for a missing one."""
        self.updates = counters["updates"]

    def leave(self) -> None:
        """Drops the communicators and leaves the world. The engine is of no use after it."""
        self.gangs.clear()
        dist.destroy_process_group()

    def _build(self) -> LossModel:
        settings = self.settings
        blueprint = build_on_meta(settings.model, torch.float32, settings.model_factory)
        own = build_on_meta(settings.model, settings.base_dtype, settings.model_factory)
        if settings.lora:
            add_adapters(own, settings.lora, master=settings.master_dtype)
        model = LossModel(own, settings.loss_chunk, self.watch, settings.token_loss)
        mesh = parameter_mesh(
            self.device.type,
            settings.shard_size,
            generation=self.generation,
            timeout_s=settings.timeout_s,
        )
        shard(
            model,
            mesh,
            self.watch,
            compute_dtype=settings.compute_dtype,
            activation_checkpointing=settings.activation_checkpointing,
        )
        tensors = initial_parameters(blueprint, settings.weights, settings.seed)
        fill(model, self.device, chain(tensors, random_adapters(own, settings.seed)))
        return model.train()

    def _check_generation(self, work: RankStep) -> None:
        if work.generation != self.generation:
            raise StaleGeneration(
                f"work for generation {work.generation} in generation {self.generation}"
            )

    def _micro_step(
        self, part: RankMicroStep, work: RankStep
    ) -> tuple[torch.Tensor, int, MicroReport]:
        loss, label_tokens, lengths = self._forward(part, work)
        with self.watch.span("backward"):
            loss.backward()
        times = self.watch.read()
        own, exchange = times.get("own_work", 0.0), times.get("all_to_all", 0.0)
        report = MicroReport(
            degree=len(part.ranks),
            tokens=sum(lengths),
            squares=sum(n * n for n in lengths),
            sequences=len(lengths),
            forward_ms=times["forward"],
            backward_ms=times["backward"],
            own_work_ms=own - exchange,
            all_to_all_ms=exchange,
            wait_ms=times["forward"] + times["backward"] - own,
        )
        return loss.detach(), label_tokens, report

    def _forward(self, part: RankMicroStep, work: RankStep) -> tuple[torch.Tensor, int, list[int]]:
        """This rank's share of the work's mean loss, its label tokens, and the pack's lengths."""
        gang = self.gangs.get(part.ranks)
        sequences = [self.read_row(row) for row in part.rows]
        shard = make_shard(sequences or EMPTY_PACK, gang.degree, gang.rank, self.device)
        self.watch.clear()
        with self.watch.span("forward"):
            loss = self.model(
                shard.input_ids,
                shard.position_ids,
                shard.labels,
                SequenceParallel(gang, shard.borders, self.backend),
            ) / max(1, work.label_tokens)
        return loss, shard.label_tokens, [len(tokens) for tokens, _ in sequences]

    def _sum(self, work: RankStep, parts: Iterable[tuple[torch.Tensor, int]]) -> float:
        """The loss over all micro-steps and ranks. Raises StepMismatch."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for loss, label_tokens in parts:
            sums[0] += loss
            sums[1] += label_tokens
        dist.all_reduce(sums)
        loss_sum, found = sums.tolist()
        if found != work.label_tokens:
            raise StepMismatch(
                f"step {work.step}: {work.label_tokens} label tokens were planned and "
                f"{found:.0f} were read: the corpus is not what its manifest says"
            )
        return loss_sum

    def _peak_memory_mb(self) -> float:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 2**20
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
