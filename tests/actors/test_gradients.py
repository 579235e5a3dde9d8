"""The promise: the plan is invisible. Gradients of any plan equal one process's."""

from __future__ import annotations

import pytest
import torch

from flexray.solver.communicators import CommunicatorCache
from tests.actors.models import (
    config,
    engine,
    gradients,
    label_tokens,
    reference_loss,
    reference_model,
    sequences,
    work_of,
    worst_difference,
)
from tests.worlds import run_world

TOLERANCE = {"float64": 1e-12, "float32": 2e-6}

A = (37, 5, 260, 18, 91, 7)  # rows 0-5
B = (120, 33, 64, 1, 2, 77, 41)  # rows 6-12
LENGTHS = A + B
# {4}, then {2, 1, 1} with permuted ranks, then {2} beside idle ranks; a group whose only row has
# one token has no label at all.
PLAN = [
    [((0, 1, 2, 3), (0, 1, 2, 3))],
    [((1, 3), (6, 8, 11)), ((0,), (4, 5)), ((2,), (7, 10))],
    [((0, 2), (12,)), ((3,), (9,))],
]


def gradients_differ(rank, world, store, hf_config, plan, lengths, settings):
    batch = sequences(lengths)
    total = label_tokens(batch)
    ours = engine(rank, world, store, batch, hf_config, loss_chunk=16, **settings)
    work = work_of(rank, plan, total, CommunicatorCache(8))
    ours.gangs.apply(work.changes)
    loss, _ = ours.accumulate(work)
    grads = gradients(ours.model.model)
    norm = ours.update(1)
    if rank:
        return None
    model = reference_model(hf_config, ours.settings.compute_dtype)
    right = reference_loss(model, batch)
    grads_right = gradients(model)
    norm_right = torch.stack([g.double().norm() for g in grads_right.values()]).norm()
    return (
        worst_difference(grads, grads_right),
        abs(loss - right.item()) / right.item(),
        abs(norm - norm_right.item()) / norm_right.item(),
    )


def check(hf_config, dtype, *, world=4, plan=PLAN, lengths=LENGTHS, **settings):
    settings = {"dtype": dtype, **settings}
    errors = run_world(world, gradients_differ, hf_config, plan, lengths, settings)[0]
    assert max(errors) <= TOLERANCE[dtype], errors


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_heterogeneous_plan(kind, tied, dtype):
    check(config(kind, tie_word_embeddings=tied), dtype)


@pytest.mark.parametrize("kv", [1, 4, 8])
def test_key_value_heads(kv):
    check(config(kv=kv), "float64")


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_activation_checkpointing(dtype):
    check(config("qwen3"), dtype, activation_checkpointing=True)


@pytest.mark.parametrize("world", [3, 5, 6, 7])
def test_worlds_that_are_no_power_of_two(world):
    plan = [
        [((0, 2), (0, 1, 2)), ((1,), (3, 4, 5))],
        [(tuple(range(world - 1))[-2:], (6, 7, 8)), ((world - 1,), (9, 10, 11, 12))],
    ]
    check(config(), "float64", world=world, plan=plan)
