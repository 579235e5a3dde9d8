"""The Ray actor of one GPU: an engine, and three threads to talk to it.

`train` runs the steps one after another in the order in which the driver queued them; `control`
answers while a step runs; `storage` waits for checkpoints that are being written.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from queue import Queue
from typing import TypeVar

import psutil
import ray
import torch
import torch.distributed as dist

from flexray.actors.checkpoint import Checkpointer, CheckpointFailed
from flexray.actors.engine import Engine, StaleGeneration, StepMismatch
from flexray.actors.host_copy import HostCopy, tensors_to_restore
from flexray.actors.model import ModelRefused
from flexray.actors.profile import Profile
from flexray.actors.rendezvous import (
    START_TIMEOUT_S,
    CollectiveFailed,
    OutOfMemory,
    meet,
    raw_group,
)
from flexray.actors.reshard import CorruptState, Moved, restore
from flexray.actors.seat import Copies, JoinReport, Left, Saved, Seat
from flexray.actors.settings import EngineSettings
from flexray.actors.work import EvaluationReport, RankStep, StepReport
from flexray.actors.world import leave_world
from flexray.datasets.data_source import RowSource

T = TypeVar("T")

# They say what is wrong with what was asked; the generation is as good as before.
REFUSALS = (StaleGeneration, StepMismatch, ModelRefused)


@dataclass(frozen=True)
class Place:
    """Where an actor runs, and what it has there."""

    pid: int
    node: str  # Ray's node id
    gpu: str  # its name on the node, an index or a UUID; the process sees it as device 0
    device_name: str  # empty on CPUs
    memory_mb: float  # of the GPU, or of the whole node on CPUs
    cores: int  # of the node
    is_blind: bool = False  # it does not see the file that `place` was asked about


@dataclass(frozen=True)
class SaveReport:
    """What one rank reports of a checkpoint whose state it has copied."""

    counters: dict[str, int]  # the engine's
    blocked_s: float  # how long training stood still for the copy


def local_device(kind: str) -> torch.device:
    """The device of this process: Ray shows each its own GPU only, so that it is always 0."""
    return torch.device("cuda:0" if kind == "cuda" else "cpu")


@ray.remote(max_restarts=0, concurrency_groups={"train": 1, "control": 1, "storage": 1})
class Worker:
    """One rank's process. Its rank and world may change; the process and its data stay."""

    engine_class: Callable[..., Engine] = Engine

    def __init__(self, settings: EngineSettings, data: RowSource, device: str) -> None:
        if device == "cpu":
            torch.set_num_threads(1)
        self.settings = settings
        self.device = local_device(device)
        self.documents = data.open()
        self.engine: Engine | None = None
        self.checkpointer: Checkpointer | None = None
        self.copies: list[HostCopy] = []  # whole ones, while there is no engine
        self.profile: Profile | None = None  # that records
        self.ran_out = False  # of memory, in the last generation
        self.being_written: Queue[Callable[[], None]] = Queue()
        # Sockets of a generation close when its garbage is collected: 0.4 s here over everything
        # that has been imported, 0.01 s over what is made from now on.
        gc.collect()
        gc.freeze()

    @ray.method(concurrency_group="control")
    def place(self, shared: Path | None = None) -> Place:
        """Where this process runs, and whether a file of the driver's is seen there."""
        context = ray.get_runtime_context()
        gpus = context.get_accelerator_ids().get("GPU", [])
        name, memory = "", psutil.virtual_memory().total
        if self.device.type == "cuda":
            properties = torch.cuda.get_device_properties(self.device)
            name, memory = properties.name, properties.total_memory
        return Place(
            pid=os.getpid(),
            node=context.get_node_id(),
            gpu=str(gpus[0]) if gpus else "",
            device_name=name,
            memory_mb=memory / 2**20,
            cores=os.cpu_count() or 1,
            is_blind=shared is not None and not shared.exists(),
        )

    @ray.method(concurrency_group="control")
    def pulse(self) -> None:
        """Answers as long as this process runs."""

    @ray.method(concurrency_group="control")
    def abort(self) -> None:
        """Ends what the present call waits for on a GPU, when a rank has died (Engine.abort)."""
        engine = self.engine
        if engine is not None:
            engine.abort()

    @ray.method(concurrency_group="train")
    def join(self, seat: Seat) -> JoinReport:
        """Takes a seat in a new generation; returns when the state to go on from is there.

        A leaver only serves its host copies. Raises ModelRefused, CorruptState, CheckpointFailed
        (also when a rank dies while one is loaded), and CollectiveFailed.
        """
        return self._together(lambda: self._join(seat))

    @ray.method(concurrency_group="train")
    def step(self, work: RankStep) -> StepReport:
        """Runs this rank's part of one step.

        Raises StaleGeneration and StepMismatch, and CollectiveFailed for whatever else goes wrong;
        then this process has left the generation and keeps its host copies. So do `evaluate`,
        `settle` and `save`.
        """
        return self._together(lambda: self._joined().run_step(work))

    @ray.method(concurrency_group="train")
    def evaluate(self, work: RankStep) -> EvaluationReport:
        """Runs this rank's part of a forward pass without training."""
        return self._together(lambda: self._joined().evaluate(work))

    @ray.method(concurrency_group="train")
    def settle(self, step: int) -> None:
        """Has the state after `step`, the last one, committed."""
        self._together(lambda: self._joined().settle(step))

    @ray.method(concurrency_group="train")
    def leave(self) -> Left:
        """Ends the generation here, if there is one, and tells which whole copies are left."""
        self._leave()
        holdings = tuple(copy.holding for copy in self.copies if copy.holding is not None)
        return Left(holdings, self.ran_out)

    @ray.method(concurrency_group="train")
    def save(self, location: str) -> SaveReport:
        """Copies the training state and begins to write it; `written` tells how that ended."""
        began = time.perf_counter()

        def save() -> tuple[dict[str, int], Callable[[], None]]:
            counters = self._joined().counters()
            assert self.checkpointer is not None
            return counters, self.checkpointer.save(location)

        written = _not_begun
        try:
            counters, written = self._together(save)
        finally:
            self.being_written.put(written)  # one for every call of `written`
        return SaveReport(counters, time.perf_counter() - began)

    @ray.method(concurrency_group="storage")
    def written(self) -> str:
        """Waits until the next `save` is written: empty, or why it could not be."""
        try:
            self.being_written.get()()
        except CheckpointFailed as error:
            return str(error)
        return ""

    @ray.method(concurrency_group="train")
    def start_profile(self) -> None:
        """Records what runs from here on."""
        self.profile = Profile(self.device)

    @ray.method(concurrency_group="train")
    def stop_profile(self) -> bytes:
        """The trace since `start_profile`, as Chrome's JSON; empty if the ranks changed since."""
        profile, self.profile = self.profile, None
        return profile.stop() if profile is not None else b""

    def _join(self, seat: Seat) -> JoinReport:
        self._leave()
        self.ran_out = False
        origin = seat.origin
        self.copies = [
            copy
            for copy in self.copies
            if isinstance(origin, Copies)
            and copy.tag is not None
            and copy.tag[:2] == (origin.generation, origin.step)
        ]
        began = time.perf_counter()
        limit = self.settings.timeout_s
        root = dist.TCPStore(
            seat.host, seat.port, is_master=False, timeout=timedelta(seconds=limit)
        )
        store = dist.PrefixStore(f"generation{seat.generation}", root)
        group = None
        if isinstance(origin, Copies):
            cpu = torch.device("cpu")
            group = raw_group(store, "transfer", seat.rank, seat.participants, cpu, limit)
        if seat.rank < seat.world:
            self.engine = self.engine_class(
                self.settings,
                self.documents.read,
                store=root,
                generation=seat.generation,
                rank=seat.rank,
                world=seat.world,
                device=self.device,
                address=ray.util.get_node_ip_address(),
                buddy=seat.buddy,
                one_node=seat.one_node,
                restoring=isinstance(origin, Copies),
                kept=self.copies,
            )
            meet(store, "checkpointer", seat.rank, seat.world, START_TIMEOUT_S)
            self.checkpointer = Checkpointer(self.engine.model.model, self.engine.optimizer)
        built = time.perf_counter()
        moved = Moved(0, 0, 0, 0.0)
        if isinstance(origin, Copies):
            meet(store, "restore", seat.rank, seat.participants, START_TIMEOUT_S)
            moved = self._restore(origin, seat, group)
        elif isinstance(origin, Saved):
            self._load(origin.location, origin.counters)
        if self.engine is not None and seat.world > 1:
            # What a failure in the very first step goes back to.
            self.engine.snapshot(origin.step)
            if seat.participants > seat.world:
                self.engine.snapshots.ready()  # held twice before anybody leaves
        if self.engine is not None:
            self.copies = []  # the engine keeps them until its first commit
        build_s = self.engine.build_s if self.engine else 0.0
        copies = self.engine.snapshots.nbytes if self.engine else sum(c.nbytes for c in self.copies)
        return JoinReport(
            form_s=built - began - build_s,
            build_s=build_s,
            restore_s=time.perf_counter() - built,
            sent_mb=moved.sent / 2**20,
            received_mb=moved.received / 2**20,
            copies_mb=copies / 2**20,
        )

    def _load(self, location: str, counters: dict[str, int]) -> None:
        engine = self._joined()
        assert self.checkpointer is not None
        self.checkpointer.load(location)
        engine.set_counters(counters)

    def _restore(self, origin: Copies, seat: Seat, group: object) -> Moved:
        copies = {copy.owner: copy for copy in self.copies}
        if self.engine is None:
            entries, tensors = next(iter(copies.values())).layout.entries, {}
            owners = self.settings.shard_size or seat.world
        else:
            model, optimizer = self.engine.model.model, self.engine.optimizer
            entries, owners = self.engine.layout.entries, self.engine.layout.owners
            tensors = tensors_to_restore(model, optimizer, origin.updates)
            self.engine.set_counters({"updates": origin.updates})
        return restore(
            copies,
            tensors,
            entries,
            origin,
            group=group,
            rank=seat.rank,
            world=seat.world,
            owners=owners,
            timeout_s=self.settings.timeout_s,
        )

    def _together(self, call: Callable[[], T]) -> T:
        """What the ranks do at once. When it fails nothing here keeps the others waiting."""
        try:
            return call()
        except REFUSALS:
            raise
        except Exception as error:
            failure = _plain(error)
            self.ran_out = isinstance(failure, OutOfMemory)
            error.__traceback__ = None  # its frames pin tensors, works and groups
        if self.engine is None:
            leave_world()  # half-way into it
        self._leave()
        raise failure

    def _leave(self) -> None:
        engine, self.engine = self.engine, None
        checkpointer, self.checkpointer = self.checkpointer, None
        if checkpointer is not None:
            checkpointer.leave()
        del checkpointer  # with its group
        profile, self.profile = self.profile, None
        try:
            if engine is not None:
                engine.leave()
        finally:
            if engine is not None:
                self.copies = engine.snapshots.whole()
            if profile is not None:
                profile.drop()

    def _joined(self) -> Engine:
        if self.engine is None:
            raise StaleGeneration("work for an actor that is in no generation")
        return self.engine


def _not_begun() -> None:
    raise CheckpointFailed("the ranks changed before it was copied")


def _plain(error: Exception) -> Exception:
    """The error in one line, without what it refers to."""
    text = " ".join(str(error).split())
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return OutOfMemory(f"out of memory: {text}")
    if isinstance(error, CollectiveFailed | CorruptState | CheckpointFailed):
        return type(error)(text)
    return CollectiveFailed(f"{type(error).__name__}: {text}")
