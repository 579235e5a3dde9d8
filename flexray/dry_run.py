"""`flexray train --dry-run`: what a run would do, without Ray, without an actor."""

from __future__ import annotations

import os
from collections.abc import Callable

import psutil
import torch

from flexray.actors.pool import cluster_of
from flexray.actors.worker import Place
from flexray.batches import Batch, batches
from flexray.checkpoints import RunState
from flexray.config import ClusterSection, Config
from flexray.errors import UserError
from flexray.journal import describe_data
from flexray.preparation import prepare
from flexray.ray_cluster import CPU_RANKS, ranks_of
from flexray.solver.baselines import batch_adaptive
from flexray.solver.cost import CostModel
from flexray.solver.planner import plan_step


def dry_run(config: Config, resume: RunState | None, say: Callable[[str], None]) -> None:
    """Checks all that `train` checks, estimates memory, and plans the first step.

    `resume`: where the run would go on. Nodes are taken to be like this machine. Raises what
    `train` raises before its first step.
    """
    job = prepare(config)
    done, cursor = (resume.step, resume.sampler) if resume else (0, None)
    work = batches(job.documents, config.train, done=done, cursor=cursor)
    places = _places(config.cluster)
    job.check_device("cuda" if places[0].device_name else "cpu")
    for line in describe_data(job.documents):
        say(line)
    cost, degrees = job.checked_on(places)
    say(
        f"{len(places)} ranks on {places[0].device_name or 'cpu'}, {job.parameters:,} parameters "
        f"in {config.train.dtype}, sequence-parallel degrees {', '.join(map(str, degrees))}"
    )
    _say_memory(cost, len(places), say)
    _say_plan(next(work), cost, places, degrees, say)
    say("Nothing was trained or written. To train: the same command without --dry-run")


def _say_memory(cost: CostModel, gpus: int, say: Callable[[str], None]) -> None:
    tokens = cost.capacity(gpus)
    if cost.tokens_per_gpu is not None:
        say(f"memory: {tokens:,} tokens a rank, as planner.capacity says")
        return
    communicators = cost.communicators * cost.communicator_mb
    buffers = f"{cost.buffers_mb:,.0f} MB buffers + " if cost.buffers_mb else ""
    say(
        f"memory of a rank, estimated: {cost.usable_mb:,.0f} MB usable = "
        f"{cost.states_mb(gpus):,.0f} MB parameters, gradients and optimizer state + "
        f"{buffers}{communicators:,.0f} MB communicators + "
        f"{tokens:,} tokens of {cost.mb_per_token:.3g} MB"
    )


def _say_plan(
    batch: Batch,
    cost: CostModel,
    places: tuple[Place, ...],
    degrees: tuple[int, ...],
    say: Callable[[str], None],
) -> None:
    cluster = cluster_of(places)
    plan = plan_step(batch.lengths, cost, cluster, degrees)
    single = batch_adaptive(batch.lengths, cost, cluster, degrees)
    speedup = single.planned_ms / plan.planned_ms
    say(
        f"step {batch.step}: {len(batch.rows)} sequences, {sum(batch.lengths):,} tokens, the "
        f"longest {max(batch.lengths):,}; plan {plan.summary}: {plan.planned_ms:,.0f} ms, at least "
        f"{plan.lower_bound_ms:,.0f} ms, {speedup:.2f}x over one degree (times are guesses "
        "until steps have been measured)"
    )


def _places(section: ClusterSection) -> tuple[Place, ...]:
    """The ranks of the run as if all nodes were this machine."""
    here = torch.cuda.device_count()
    if section.device == "cuda" and not here:
        raise UserError(
            "cluster.device=cuda, and --dry-run looks at this machine, which has no GPU: run it on "
            "a node of the cluster, or plan with a preset: flexray plan --help"
        )
    is_cuda = section.device != "cpu" and here > 0
    name, memory = "", psutil.virtual_memory().total
    if is_cuda:
        properties = torch.cuda.get_device_properties(0)
        name, memory = properties.name, properties.total_memory
    ranks = ranks_of(section, here if is_cuda else CPU_RANKS)
    return tuple(
        Place(
            pid=0,
            node=str(rank // here if is_cuda else 0),
            gpu=str(rank % here) if is_cuda else "",
            device_name=name,
            memory_mb=memory / 2**20,
            cores=os.cpu_count() or 1,
        )
        for rank in range(ranks)
    )
