"""The training engine of one rank: model, gangs, step. It knows no Ray.

A step is M micro-steps (forward, backward, gradients summed over the world), then one optimizer
step. How ranks are grouped changes from micro-step to micro-step and never the result.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from flexray.actors.attention.backends import choose_backend
from flexray.actors.attention.ulysses import SequenceParallel
from flexray.actors.build import build
from flexray.actors.gang import GangCache
from flexray.actors.host_copy import HostCopy, Layout, entries_of, live_tensors
from flexray.actors.mesh import parameter_mesh
from flexray.actors.optimizer import adamw, clip
from flexray.actors.pack import EMPTY_PACK, Tokens, make_shard
from flexray.actors.settings import EngineSettings
from flexray.actors.sharding import reshard
from flexray.actors.snapshots import Snapshots
from flexray.actors.timing import Stopwatch
from flexray.actors.work import (
    EvaluationReport,
    MicroReport,
    RankMicroStep,
    RankStep,
    StepReport,
)
from flexray.actors.world import enter_world, leave_world

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
        address: str = "127.0.0.1",
        buddy: int = 1,
        one_node: bool = False,
        restoring: bool = False,
        kept: Sequence[HostCopy] = (),
    ) -> None:
        """Joins the world of this generation (a collective call) and builds the sharded model.

        store: shared by all ranks; every generation has its own prefix in it.
        address: of this node, for the rank whose snapshots this one keeps.
        buddy: rank (rank + buddy) % world keeps this rank's snapshots.
        one_node: all ranks are on this one.
        restoring: trained parameters get no values, since they are to be written next.
        kept: host copies of an older generation, held until this one's first commit.
        """
        self.settings = settings
        self.read_row = read_row
        self.generation, self.rank, self.world = generation, rank, world
        self.device = torch.device(device)
        self.backend = choose_backend(settings.attention, settings.compute_dtype, self.device)
        self.watch = Stopwatch(self.device)
        self.updates = 0  # made; none without a label or with a norm that is not finite
        self._ended: float | None = None
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.store = dist.PrefixStore(f"generation{generation}", store)
        self.gangs = GangCache(rank, self.store, self.device, settings.timeout_s, self.watch)
        self._still_s = 0.0  # of the present step: training stood still for snapshots
        self._left = False
        try:
            began = time.perf_counter()
            enter_world(self.store, rank, world, self.device, settings.timeout_s)
            mesh = parameter_mesh(
                self.device.type,
                settings.shard_size,
                generation=generation,
                timeout_s=settings.timeout_s,
            )
            formed = time.perf_counter()
            self.model = build(settings, mesh, self.device, self.watch, frozen_only=restoring)
            self.optimizer = adamw(
                self.model.parameters(), betas=settings.betas, weight_decay=settings.weight_decay
            )
            self.layout = Layout(entries_of(self.model.model), mesh.size(-1))
            self.form_s, self.build_s = formed - began, time.perf_counter() - formed
            self.snapshots = Snapshots(
                self.layout,
                store=self.store,
                generation=generation,
                rank=rank,
                world=world,
                buddy=buddy,
                address=address,
                timeout_s=settings.timeout_s,
                pinned=self.device.type == "cuda",
                one_node=one_node,
                kept=kept,
            )
        except BaseException:
            leave_world()
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
        self._still_s = 0.0
        made = self.gangs.apply(work.changes)
        rate = self.settings.learning_rate_of(self.updates + 1)
        loss, reports = self.accumulate(work)
        norm = self.update() if work.label_tokens else 0.0
        if self.world > 1 and work.snapshot:
            self.snapshot(work.step)  # alone in its world a rank has nobody who could need it
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
            snapshot_ms=self._still_s * 1e3,
            idle_ms=idle * 1e3,
            peak_memory_mb=self._peak_memory_mb(),
            tells_memory=self.device.type == "cuda",
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

    def snapshot(self, step: int) -> None:
        """Copies the state after `step` to host memory; it is sent while training goes on."""
        began = time.perf_counter()
        tensors = live_tensors(self.model.model, self.optimizer)
        self.snapshots.take(step, self.updates, tensors)
        self._still_s += time.perf_counter() - began

    def settle(self, step: int) -> None:
        """Has the state after `step`, which was the last one, committed everywhere.

        A collective call. Raises CollectiveFailed when a copy could not be replicated.
        """
        newest = self.snapshots.newest
        if newest is None or newest.step != step:
            self._commit()  # rule 2: after a step without labels none has followed the snapshot
            self.snapshot(step)
        self._commit()

    def abort(self) -> None:
        """Makes NCCL calls in which another thread of this process waits fail at once.

        With gloo there is nothing to do: calls end when the others close their sockets. Unproven:
        several GPUs were not at hand.
        """
        if self.device.type == "cuda":
            self.gangs.abort()
            dist.distributed_c10d._abort_process_group()

    def leave(self) -> None:
        """Ends the generation here: its threads, communicators, and all that keeps sockets open.

        Host copies stay (`snapshots.whole()`); the engine is of no other use after it. Safe to call
        twice.
        """
        if self._left:
            return
        self._left = True
        self.snapshots.close()
        self.gangs.clear()
        del self.model, self.optimizer
        leave_world()

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
        """The loss over all micro-steps and ranks: the commit collective of snapshots.py.

        Raises StepMismatch, and CollectiveFailed when a snapshot could not be replicated.
        """
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for loss, label_tokens in parts:
            sums[0] += loss
            sums[1] += label_tokens
        began = time.perf_counter()
        self.snapshots.ready()
        self._still_s += time.perf_counter() - began
        dist.all_reduce(sums)
        loss_sum, found = sums.tolist()  # returned on the host: the step before is committed
        self.snapshots.commit()
        if found != work.label_tokens:
            raise StepMismatch(
                f"step {work.step}: {work.label_tokens} label tokens were planned and "
                f"{found:.0f} were read: the corpus is not what its manifest says"
            )
        return loss_sum

    def _commit(self) -> None:
        """A commit collective of its own."""
        self.snapshots.ready()
        everybody = torch.zeros(1, device=self.device)
        dist.all_reduce(everybody)
        everybody.tolist()
        self.snapshots.commit()

    def _peak_memory_mb(self) -> float:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 2**20
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
