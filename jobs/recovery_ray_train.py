"""Ray Train v2 in its elastic mode, as its documentation shows it, and SIGKILLs of its workers.

FSDP2, AdamW, a checkpoint every five steps by torch.distributed.checkpoint; its own defaults for
everything else. Every worker writes down, in a file of its own, what it does and when.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import ray
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from flexray.errors import UserError
from flexray.jobs.recovery_model import (
    FEWEST,
    LEARNING_RATE,
    LENGTH,
    MODEL,
    RANKS,
    SEQUENCES,
    wait_until,
)
from flexray.json_lines import JsonLinesWriter, read_json_lines

CHECKPOINT_EVERY = 5
NAME = "checkpoints"
TIMEOUT_S = 300.0  # for it to start, or to go on after a SIGKILL
Line = dict[str, Any]


@dataclass(frozen=True)
class Restart:
    """What one SIGKILL of a worker took. Times are seconds.

    Attributes:
        restart_s: to the start of the training function on the new workers.
        load_s: from there until the model is built and the checkpoint loaded.
        rest_s: from there to the end of the first step, less that step itself, which is made again.
        lost_steps: done before and made again.
        again_s: the time of these.
        kept: workers with the process that they had.
    """

    restart_s: float
    load_s: float
    rest_s: float
    lost_steps: int
    again_s: float
    kept: int

    @property
    def total_s(self) -> float:
        """SIGKILL to the end of the first step, less the time of that step."""
        return self.restart_s + self.load_s + self.rest_s


def kill_workers(folder: Path, kills: int, seed: int) -> list[Restart]:
    """SIGKILLs one of four workers `kills` times, each at a random moment of a step.

    Between two of them at least six steps are made, so that there is a newer checkpoint. Raises
    UserError where Ray Train is not installed, RunFailed where it does not go on.
    """
    trainer = _trainer(folder)
    logs, random, restarts = folder / "logs", Random(seed), []
    logs.mkdir(parents=True)
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    ray.init(address="local", num_cpus=RANKS, include_dashboard=False, **quiet)
    try:
        # Daemon: where it does not go on, it is left behind and ends with Ray.
        threading.Thread(target=_fit, args=(trainer,), daemon=True).start()
        killed_at = 0.0
        for _ in range(kills):
            least = CHECKPOINT_EVERY + 1 + random.randrange(CHECKPOINT_EVERY)
            before = _wait_for_steps(logs, killed_at, least)
            time.sleep(random.uniform(0, _steps(before)[-1]["step_s"]))
            pid = random.choice([line["pid"] for line in before if line["kind"] == "begun"])
            killed_at = time.time()
            os.kill(pid, signal.SIGKILL)
            _wait_for_steps(logs, killed_at, 1)
            restarts.append(restart_of(killed_at, _read(logs)))
    finally:
        ray.shutdown()  # ends the workers too
    shutil.rmtree(folder / NAME)  # checkpoints
    return restarts


def restart_of(killed_at: float, lines: list[Line]) -> Restart:
    """From what all workers wrote until the first step after a SIGKILL, by time."""
    after = _of_workers_since(killed_at, lines)
    before = [line for line in lines if line not in after]
    begun = [line for line in after if line["kind"] == "begun"]
    loaded = next(line for line in after if line["kind"] == "loaded")
    first = _steps(after)[0]
    begun_at = min(line["time"] for line in begun)
    # The newest run of each step is the one that is lost.
    done = {line["step"]: line["step_s"] for line in _steps(before)}
    last = _steps(before)[-1]["step"]
    again = range(first["step"], last + 1)
    return Restart(
        restart_s=begun_at - killed_at,
        load_s=loaded["time"] - begun_at,
        rest_s=first["time"] - loaded["time"] - first["step_s"],
        lost_steps=len(again),
        again_s=sum(done[step] for step in again),
        kept=len({line["pid"] for line in before} & {line["pid"] for line in begun}),
    )


def _trainer(folder: Path) -> Any:
    try:
        from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchTrainer
    except ImportError as error:
        raise UserError(
            "Ray Train is not there to compare with: pip install 'ray[train]' "
            f"({' '.join(str(error).split())})"
        ) from None
    return TorchTrainer(
        train_worker,
        train_loop_config={"logs": str(folder.absolute() / "logs")},
        scaling_config=ScalingConfig(num_workers=(FEWEST, RANKS)),
        run_config=RunConfig(
            name=NAME,
            storage_path=str(folder.absolute()),
            failure_config=FailureConfig(max_failures=-1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )


def _fit(trainer: Any) -> None:
    with suppress(Exception):  # it ends with Ray, under its feet
        trainer.fit()


def train_worker(config: dict[str, str]) -> None:
    """What each worker runs, from the start or from the newest checkpoint."""
    from ray import train

    rank, world = dist.get_rank(), dist.get_world_size()
    with JsonLinesWriter(Path(config["logs"]) / f"{os.getpid()}.jsonl") as log:

        def say(kind: str, **values: Any) -> None:
            log.append({"kind": kind, "time": time.time(), "pid": os.getpid()} | values)

        say("begun")
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODEL))
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
        step = 0
        if checkpoint := train.get_checkpoint():
            step = _load(checkpoint, model, optimizer)
        if rank == 0:
            say("loaded")
        random = torch.Generator().manual_seed(rank)
        own = range(rank, SEQUENCES, world)
        while True:
            step, began = step + 1, time.perf_counter()
            tokens = torch.randint(MODEL["vocab_size"], (len(own), LENGTH), generator=random)
            model(input_ids=tokens, labels=tokens).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0:
                say("step", step=step, step_s=time.perf_counter() - began)
            if step % CHECKPOINT_EVERY == 0:
                _save(step, model, optimizer)


def _save(step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    from ray import train

    with tempfile.TemporaryDirectory() as location:
        dcp.save(_state(step, model, optimizer), checkpoint_id=location)
        checkpoint = train.Checkpoint.from_directory(location)
        train.report({"step": step}, checkpoint=checkpoint)


def _load(checkpoint: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    state = _state(0, model, optimizer)
    with checkpoint.as_directory() as location:
        dcp.load(state, checkpoint_id=location)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    return int(state["step"])


def _state(step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "step": step,
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }


def _wait_for_steps(logs: Path, since: float, steps: int) -> list[Line]:
    """What the workers of the newest attempt wrote, once they have done so many steps."""
    found: list[Line] = []

    def are_done() -> bool:
        found[:] = _of_workers_since(since, _read(logs))
        return len(_steps(found)) >= steps

    wait_until(are_done, TIMEOUT_S, f"step {steps} of Ray Train after a start")
    return found


def _of_workers_since(since: float, lines: list[Line]) -> list[Line]:
    """Lines of those that began later: the older ones may still end a step."""
    new = {line["pid"] for line in lines if line["kind"] == "begun" and line["time"] > since}
    return [line for line in lines if line["pid"] in new]


def _read(logs: Path) -> list[Line]:
    lines = [line for path in logs.glob("*.jsonl") for line in read_json_lines(path)]
    return sorted(lines, key=lambda line: line["time"])


def _steps(lines: list[Line]) -> list[Line]:
    return [line for line in lines if line["kind"] == "step"]
