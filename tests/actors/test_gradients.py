"""The promise: the plan is invisible. Gradients of any plan equal one process's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

import flexray.actors.engine
from flexray.actors.pack import Borders, make_shard, shift
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


def differences(rank, world, store, hf_config, cases, settings, break_it=None):
    """For every (plan, batch), in one engine: relative errors of gradients, loss and norm."""
    if break_it is not None:
        break_it()
    rows = []
    ours = engine(rank, world, store, rows, hf_config, **{"loss_chunk": 16} | settings)
    communicators = CommunicatorCache(8)
    results = []
    for plan, batch in cases:
        rows[:] = batch
        work = work_of(rank, plan, label_tokens(batch), communicators)
        ours.gangs.apply(work.changes)
        loss, _ = ours.accumulate(work)
        grads = gradients(ours.model.model)
        if rank == 0:
            model = reference_model(
                hf_config, ours.settings.compute_dtype, factory=settings.get("model_factory")
            )
            right = reference_loss(model, batch, settings.get("token_loss"))
            grads_right = gradients(model)
            results.append((grads, loss, grads_right, right.item()))
    norm = ours.update()
    if rank:
        return None
    norm_right = torch.stack([g.double().norm() for g in grads_right.values()]).norm().item()
    errors = [
        (worst_difference(grads, grads_right), abs(loss - right) / right)
        for grads, loss, grads_right, right in results
    ]
    errors[-1] += (abs(norm - norm_right) / norm_right,)
    return errors


def gradients_differ(rank, world, store, hf_config, plan, lengths, settings):
    cases = [(plan, sequences(lengths))]
    errors = differences(rank, world, store, hf_config, cases, settings)
    return errors and errors[0]


def one_after_another(rank, world, store, models, plan, lengths):
    """Errors of every (config, settings), each in its own generation of the same world."""
    results = []
    for number, (hf_config, settings) in enumerate(models):
        own = dist.PrefixStore(str(number), store)
        results.append(gradients_differ(rank, world, own, hf_config, plan, lengths, settings))
        dist.destroy_process_group()
    return results


def check(models, *, world=4, plan=PLAN, lengths=LENGTHS):
    errors = run_world(world, one_after_another, models, plan, lengths)[0]
    for (hf_config, settings), found in zip(models, errors, strict=True):
        assert max(found) <= TOLERANCE[settings["dtype"]], (hf_config, settings, found)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_heterogeneous_plan_tied_and_untied(kind):
    check(
        [
            (config(kind, tie_word_embeddings=tied), {"dtype": dtype})
            for tied in (False, True)
            for dtype in TOLERANCE
        ]
    )


def test_key_value_heads():
    check([(config(kv=kv), {"dtype": "float64"}) for kv in (1, 4, 8)])


def test_activation_checkpointing():
    check([(config("qwen3"), {"dtype": d, "activation_checkpointing": True}) for d in TOLERANCE])


@pytest.mark.parametrize("world", [3, 5, 6, 7])
def test_worlds_that_are_no_power_of_two(world):
    plan = [
        [((0, 2), (0, 1, 2)), ((1,), (3, 4, 5))],
        [(tuple(range(world - 1))[-2:], (6, 7, 8)), ((world - 1,), (9, 10, 11, 12))],
    ]
    check([(config(), {"dtype": "float64"})], world=world, plan=plan)


def half(rank, world, store, layers):
    """Whole gradients in float32 and bfloat16 of PLAN, and in bfloat16 of its first micro-step."""
    batch = sequences(LENGTHS)
    found = []
    for number, (dtype, plan) in enumerate(
        (("float32", PLAN), ("bfloat16", PLAN), ("bfloat16", PLAN[:1]))
    ):
        own = dist.PrefixStore(str(number), store)
        hf_config = config(num_hidden_layers=layers)
        ours = engine(rank, world, own, batch, hf_config, generation=number, dtype=dtype)
        rows = [row for micro_step in plan for _, rows in micro_step for row in rows]
        total = label_tokens([batch[row] for row in rows])
        work = work_of(rank, plan, total, CommunicatorCache(8), generation=number)
        ours.gangs.apply(work.changes)
        ours.accumulate(work)
        found.append({n: g.numpy() for n, g in gradients(ours.model.model).items()})
        ours.leave()
    return found if rank == 0 else None


@pytest.mark.parametrize("layers", [2, 6])
def test_bfloat16_gradients_have_the_error_of_their_roundings_and_no_more(layers):
    """About 24 products, norms and sums a layer round to 8 bits, forward and backward: errors of
    2^-9 that add up like a random walk, to twice which the whole gradient may be off. What ranks
    and micro-steps add to each other is float32, so that it adds nothing."""
    exact, rounded, first = run_world(4, half, layers)[0]
    off = sum(np.square(rounded[n] - exact[n], dtype=np.float64).sum() for n in exact)
    whole = sum(np.square(exact[n], dtype=np.float64).sum() for n in exact)
    assert 2**-9 < (off / whole) ** 0.5 < 2 * (24 * layers) ** 0.5 * 2**-9
    for name, gradient in first.items():
        assert gradient.dtype == np.float32
        # A sum of four ranks' gradients in bfloat16 would end in 16 zero bits.
        assert (gradient.view(np.uint32) & 0xFFFF).any(), name


def labels_shifted_after_sharding(shard):
    ids = shard.input_ids[0]
    return replace(shard, labels=torch.from_numpy(shift(ids.numpy())))


def shard_local_positions(shard):
    return replace(shard, position_ids=torch.arange(shard.labels.numel())[None])


def one_border_for_the_pack(shard):
    return replace(shard, borders=Borders([shard.borders.tokens]))


class Break:
    """Changes every shard that the engine makes, in this process."""

    def __init__(self, change):
        self.change = change

    def __call__(self):
        def broken(*args):
            return self.change(make_shard(*args))

        flexray.actors.engine.make_shard = broken


@pytest.mark.parametrize(
    "mistake", [labels_shifted_after_sharding, shard_local_positions, one_border_for_the_pack]
)
def test_negative_control(mistake):
    """The mistakes that this test is for are far outside its tolerance."""
    cases = [(PLAN, sequences(LENGTHS))]
    errors = run_world(4, differences, config(), cases, {"dtype": "float64"}, Break(mistake))[0]
    assert errors[0][0] > 1e-3
