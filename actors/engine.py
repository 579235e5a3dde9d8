"""The training engine of one rank: model, gangs, step. It knows no Ray.

A step is M micro-steps (forward, backward, gradients summed over the world), then one optimizer
step. How ranks are grouped changes from micro-step to micro-step and never the result.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig

from flexray.actors.attention.backends import choose_backend
from flexray.actors.attention.ulysses import SequenceParallel
from flexray.actors.gang import GangCache
from flexray.actors.loss import LossModel
from flexray.actors.model import build_on_meta
from flexray.actors.pack import EMPTY_PACK, Tokens, make_shard
from flexray.actors.sharding import fill, random_parameters, saved_parameters, shard
from flexray.actors.timing import Stopwatch
from flexray.actors.work import MicroReport, RankMicroStep, RankStep, StepReport

ReadRow = Callable[[int], Tokens]


class StaleGeneration(RuntimeError):
    """A call for a membership that is over."""


class StepMismatch(RuntimeError):
    """What the ranks read is not what the driver planned."""


@dataclass(frozen=True)
class EngineSettings:
    """All that decides what is trained and how, the same on every rank."""

    model: PretrainedConfig
    weights: Path | None = None  # a folder of safetensors; None: random
    dtype: str = "float32"  # bfloat16: bfloat16 compute, float32 masters and reductions
    seed: int = 0
    attention: str = "auto"
    activation_checkpointing: bool = False
    loss_chunk: int = 1024  # tokens whose logits are in memory at once
    learning_rate: float = 1e-3
    warmup_steps: int = 0
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    timeout_s: float = 300.0  # of a collective

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of forward and backward."""
        return {
            "float32": torch.float32,
            "float64": torch.float64,
            "bfloat16": torch.bfloat16,
        }[self.dtype]

    @property
    def master_dtype(self) -> torch.dtype:
        """The dtype of parameters, gradients and optimizer state."""
        return torch.float64 if self.dtype == "float64" else torch.float32


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
        self.updates = 0  # optimizer steps made; steps without a label make none
        self._ended: float | None = None
        try:
            self.model = self._build()
            self.optimizer = self._optimizer()
        except BaseException:
            self.leave()
            raise

    def run_step(self, work: RankStep) -> StepReport:
        """One whole step: micro-steps, clipping, optimizer.

        Raises StaleGeneration for another generation's work and StepMismatch when the ranks
        together read another number of label tokens than planned; both change nothing.
        """
        if work.generation != self.generation:
            raise StaleGeneration(
                f"work for generation {work.generation} in generation {self.generation}"
            )
        started = time.perf_counter()
        idle = 0.0 if self._ended is None else started - self._ended
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        made = self.gangs.apply(work.changes)
        loss, reports = self.accumulate(work)
        norm = self.update() if work.label_tokens else 0.0
        self._ended = time.perf_counter()
        return StepReport(
            step=work.step,
            generation=self.generation,
            rank=self.rank,
            loss=loss,
            gradient_norm=norm,
            micro_steps=tuple(reports),
            new_communicators=made,
            step_ms=(self._ended - started) * 1e3,
            idle_ms=idle * 1e3,
            peak_memory_mb=self._peak_memory_mb(),
        )

    def accumulate(self, work: RankStep) -> tuple[float, list[MicroReport]]:
        """Runs the micro-steps: gradients of the step's mean loss, summed over ranks, in `.grad`.

        Returns the step's loss (the same on every rank) and this rank's reports.
        """
        self.optimizer.zero_grad()
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        reports = []
        for micro_step in work.micro_steps:
            loss, label_tokens, report = self._micro_step(micro_step, max(1, work.label_tokens))
            sums[0] += loss
            sums[1] += label_tokens
            reports.append(report)
        dist.all_reduce(sums)
        loss_sum, label_tokens = sums.tolist()
        if label_tokens != work.label_tokens:
            self.optimizer.zero_grad()
            raise StepMismatch(
                f"step {work.step}: {work.label_tokens} label tokens were planned and "
                f"{label_tokens:.0f} were read: the corpus is not what its manifest says"
            )
        return loss_sum, reports

    def update(self) -> float:
        """Clips by the global norm and makes one optimizer step.

        Returns the norm before clipping.
        """
        parameters = list(self.model.parameters())
        total = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        norm = total.full_tensor() if isinstance(total, DTensor) else total
        torch.nn.utils.clip_grads_with_norm_(parameters, self.settings.clip_norm, norm)
        self.updates += 1
        warmup = min(1.0, self.updates / max(1, self.settings.warmup_steps))
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * warmup
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)

    def leave(self) -> None:
        """Drops the communicators and leaves the world. The engine is of no use after it."""
        self.gangs.clear()
        dist.destroy_process_group()

    def _build(self) -> LossModel:
        settings = self.settings
        blueprint = build_on_meta(settings.model, torch.float32)
        model = LossModel(
            build_on_meta(settings.model, settings.master_dtype), settings.loss_chunk, self.watch
        )
        # The generation in the mesh's name keeps DTensor's caches of one membership from serving
        # another.
        mesh = init_device_mesh(
            self.device.type, (self.world,), mesh_dim_names=(f"generation{self.generation}",)
        )
        shard(
            model,
            mesh,
            self.watch,
            compute_dtype=settings.compute_dtype,
            activation_checkpointing=settings.activation_checkpointing,
        )
        if settings.weights is None:
            tensors = random_parameters(blueprint, settings.seed)
        else:
            tensors = saved_parameters(blueprint, settings.weights)
        fill(model, self.device, tensors)
        return model.train()

    def _optimizer(self) -> torch.optim.AdamW:
        parameters = list(self.model.parameters())
        return torch.optim.AdamW(
            [
                {
                    "params": [p for p in parameters if p.ndim >= 2],
                    "weight_decay": self.settings.weight_decay,
                },
                {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
            ],
            lr=self.settings.learning_rate,
            betas=self.settings.betas,
            fused=self.device.type == "cuda",
        )

    def _micro_step(
        self, part: RankMicroStep, step_label_tokens: int
    ) -> tuple[torch.Tensor, int, MicroReport]:
        gang = self.gangs.get(part.ranks)
        sequences = [self.read_row(row) for row in part.rows]
        shard = make_shard(sequences or EMPTY_PACK, gang.degree, gang.rank, self.device)
        self.watch.clear()
        with self.watch.span("forward"):
            loss = (
                self.model(
                    shard.input_ids,
                    shard.position_ids,
                    shard.labels,
                    SequenceParallel(gang, shard.borders, self.backend),
                )
                / step_label_tokens
            )
        with self.watch.span("backward"):
            loss.backward()
        times = self.watch.read()
        own, exchange = times.get("own_work", 0.0), times.get("all_to_all", 0.0)
        lengths = [len(tokens) for tokens, _ in sequences]
        return (
            loss.detach().double(),
            shard.label_tokens,
            MicroReport(
                degree=gang.degree,
                tokens=sum(lengths),
                squares=sum(n * n for n in lengths),
                sequences=len(lengths),
                forward_ms=times["forward"],
                backward_ms=times["backward"],
                own_work_ms=own - exchange,
                all_to_all_ms=exchange,
                wait_ms=times["forward"] + times["backward"] - own,
            ),
        )

    def _peak_memory_mb(self) -> float:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 2**20
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
