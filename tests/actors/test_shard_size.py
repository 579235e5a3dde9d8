"""Parameters sharded inside groups of ranks and replicated across them: the same numbers."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from flexray.actors.lora import Lora
from flexray.actors.model import ModelRefused
from flexray.solver.communicators import CommunicatorCache
from tests.actors.models import config, engine, label_tokens, sequences, work_of
from tests.actors.test_checkpoint import trained as trained_engine
from tests.actors.test_checkpoint import whole_state
from tests.actors.test_gradients import LENGTHS, PLAN, TOLERANCE, check
from tests.worlds import run_world

SIX = [
    [((0, 2), (0, 1, 2)), ((1,), (3, 4, 5))],
    [((3, 4), (6, 7, 8)), ((5,), (9, 10, 11, 12))],
    [],  # a micro-step in which every rank idles
]


@pytest.mark.parametrize("world, plan, sizes", [(4, PLAN, (1, 2, 4)), (6, SIX, (2, 3))])
def test_gradients_are_those_of_one_process(world, plan, sizes):
    models = [
        (config("qwen3", tie_word_embeddings=size != 2), {"dtype": dtype, "shard_size": size})
        for size in sizes
        for dtype in TOLERANCE
    ]
    check(models, world=world, plan=plan)


def trained(rank, world, store, sizes, settings):
    """Losses, norms and own parameters after three steps, and how many rows are held, by size."""
    batch = sequences(LENGTHS)
    found = []
    for number, size in enumerate(sizes):
        own = dist.PrefixStore(str(number), store)
        keys = {"shard_size": size, "loss_chunk": 64, "clip_norm": 0.5, **settings}
        ours = engine(rank, world, own, batch, config(), generation=number, **keys)
        communicators = CommunicatorCache(8)
        total = label_tokens(batch)
        works = [
            work_of(rank, PLAN, total, communicators, step, generation=number) for step in (1, 2, 3)
        ]
        reports = [ours.run_step(work) for work in works]
        after = ours.evaluate(work_of(rank, PLAN, total, communicators, generation=number)).loss
        parameters = list(ours.model.parameters())
        states = [s["exp_avg"] for s in ours.optimizer.state.values()]
        found.append(
            (
                [r.loss for r in reports] + [after],
                [r.gradient_norm for r in reports],
                [p.to_local().detach().numpy() for p in parameters],
                sum(p.to_local().numel() for p in (*parameters, *states)),
                sum(p.numel() for p in (*parameters, *states)),
            )
        )
        assert all(isinstance(p, DTensor) for p in parameters)
        ours.leave()
    return found


def test_training_is_the_same_and_replicas_stay_bit_equal():
    sizes = (None, 1, 2)
    ranks = run_world(4, trained, sizes, {"dtype": "float64"})
    for rank, (plain, single, pair) in enumerate(ranks):
        for found in (single, pair):
            assert found[0] == pytest.approx(plain[0], rel=1e-12)
            assert found[1] == pytest.approx(plain[1], rel=1e-12)
        for found, size in ((plain, 4), (single, 1), (pair, 2)):
            held, whole = found[3:]
            assert held == pytest.approx(whole / size, rel=0.01)  # a quarter, all, half
        for number, size in ((1, 1), (2, 2)):  # every shard is bit for bit its first replica's
            first = ranks[rank % size][number][2]
            assert all((a == b).all() for a, b in zip(ranks[rank][number][2], first, strict=True))


def test_bfloat16_sums_replicas_in_float32():
    losses = [found[0] for found in run_world(4, trained, (None, 2), {"dtype": "bfloat16"})[0]]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


class Calls(torch.utils._python_dispatch.TorchDispatchMode):
    """Collectives by name, with how many elements they had."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.calls.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def collectives(rank, world, store, size):
    batch = sequences(LENGTHS)
    ours = engine(rank, world, store, batch, config(), shard_size=size)
    work = work_of(rank, PLAN, label_tokens(batch), CommunicatorCache(8))
    ours.gangs.apply(work.changes)
    with Calls() as seen:
        ours.accumulate(work)
    return [name for name in seen.calls if "allreduce" in name]


def test_replicas_are_summed_once_a_step():
    assert len(PLAN) == 3
    assert [len(calls) for calls in run_world(4, collectives, None)] == [1] * 4  # the loss
    # The loss, and the gradients of two layers and the root: not three times.
    assert [len(calls) for calls in run_world(4, collectives, 2)] == [1 + 3] * 4


def refused(rank, world, store, size):
    try:
        engine(rank, world, store, [], config(), shard_size=size)
    except ModelRefused as error:
        return str(error), dist.is_initialized()


@pytest.mark.parametrize("size", [2, 4])
def test_a_size_that_does_not_divide_the_world_is_one_line(size):
    said = run_world(3, refused, size)
    line = (
        f"cluster.shard_size={size} does not divide the 3 ranks of this run: use one of [1, 3] "
        "or other cluster.gpus"
    )
    assert said == [(line, False)] * 3


def saved(rank, world, store, location, settings):
    ours, checkpointer = trained_engine(rank, world, store, 3, **settings)
    checkpointer.save(location)()
    return whole_state(ours)


def loaded(rank, world, store, location, settings):
    ours, checkpointer = trained_engine(rank, world, store, 0, **settings)
    checkpointer.load(location)
    return whole_state(ours)


@pytest.mark.parametrize("lora", [None, Lora(rank=3, alpha=6.0)], ids=["whole", "adapters"])
def test_a_state_loads_bit_equal_in_groups_of_another_size(tmp_path, lora):
    location = str(tmp_path / "pairs")
    right = run_world(4, saved, location, {"shard_size": 2, "lora": lora})[0]
    assert right
    for world, size in ((4, None), (4, 1), (3, None), (6, 3)):
        settings = {"shard_size": size, "lora": lora}
        for state in run_world(world, loaded, location, settings):
            assert state.keys() == right.keys()
            assert all((state[key] == right[key]).all() for key in right), (world, size)
