"""The Ray actor of one GPU: an engine, and three threads to talk to it.

`train` runs the steps one after another in the order in which the driver queued them; `control`
answers while a step runs; `storage` waits for checkpoints that are being written.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from queue import Queue

import psutil
import ray
import torch
import torch.distributed as dist

from flexray.actors.checkpoint import Checkpointer, CheckpointFailed
from flexray.actors.engine import Engine, StaleGeneration
from flexray.actors.profile import Profile
from flexray.actors.settings import EngineSettings
from flexray.actors.work import EvaluationReport, RankStep, StepReport
from flexray.datasets.data_source import DataSource


@dataclass(frozen=True)
class Place:
    """Where an actor runs, and what it has there."""

    pid: int
    node: str  # Ray's node id
    gpu: str  # its name on the node, an index or a UUID; the process sees it as device 0
    device_name: str  # empty on CPUs
    memory_mb: float  # of the GPU, or of the whole node on CPUs
    cores: int  # of the node


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

    def __init__(self, settings: EngineSettings, data: DataSource, device: str) -> None:
        if device == "cpu":
            torch.set_num_threads(1)
        self.settings = settings
        self.device = local_device(device)
        self.documents = data.open()
        self.engine: Engine | None = None
        self.checkpointer: Checkpointer | None = None
        self.being_written: Queue[Callable[[], None]] = Queue()

    @ray.method(concurrency_group="control")
    def place(self) -> Place:
        """Where this process runs."""
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
        )

    @ray.method(concurrency_group="control")
    def sees(self, path: str) -> bool:
        """Whether there is such a file where this process runs."""
        return Path(path).exists()

    @ray.method(concurrency_group="train")
    def join(self, generation: int, rank: int, world: int, host: str, port: int) -> None:
        """Becomes `rank` of `world` in a new generation; returns when all have joined."""
        timeout = timedelta(seconds=self.settings.timeout_s)
        store = dist.TCPStore(host, port, is_master=False, timeout=timeout)
        self.engine = Engine(
            self.settings,
            self.documents.read,
            store=store,
            generation=generation,
            rank=rank,
            world=world,
            device=self.device,
        )
        self.checkpointer = Checkpointer(self.engine.model.model, self.engine.optimizer)

    @ray.method(concurrency_group="train")
    def step(self, work: RankStep) -> StepReport:
        """Runs this rank's part of one step."""
        return self._joined().run_step(work)

    @ray.method(concurrency_group="train")
    def evaluate(self, work: RankStep) -> EvaluationReport:
        """Runs this rank's part of a forward pass without training."""
        return self._joined().evaluate(work)

    @ray.method(concurrency_group="train")
    def save(self, location: str) -> SaveReport:
        """Copies the training state and begins to write it; `written` tells how that ended."""
        began = time.perf_counter()
        counters = self._joined().counters()
        assert self.checkpointer is not None
        self.being_written.put(self.checkpointer.save(location))
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
    def load(self, location: str, counters: dict[str, int]) -> None:
        """Goes on from a checkpoint. Raises CheckpointFailed."""
        engine = self._joined()
        assert self.checkpointer is not None
        self.checkpointer.load(location)
        engine.set_counters(counters)

    @ray.method(concurrency_group="train")
    def start_profile(self) -> None:
        """Records what runs from here on."""
        self.profile = Profile(self.device)

    @ray.method(concurrency_group="train")
    def stop_profile(self) -> bytes:
        """The trace since `start_profile`, as Chrome's JSON."""
        return self.profile.stop()

    def _joined(self) -> Engine:
        if self.engine is None:
            raise StaleGeneration("work before this actor joined a generation")
        return self.engine
