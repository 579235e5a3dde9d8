"""The promise: the plan is invisible. Gradients of any plan equal one process's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

import flexray.actors.engine
from flexray.actors.attention.ulysses import SequenceParallel
from flexray.actors.loss import LossModel
from flexray.actors.pack import IGNORE, Borders, make_shard, shift
from flexray.actors.timing import Stopwatch
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
            model = reference_model(hf_config, ours.settings.compute_dtype)
            right = reference_loss(model, batch)
            grads_right = gradients(model)
            results.append((grads, loss, grads_right, right.item()))
    norm = ours.update(1)
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


def all_the_same(degree, world=8):
    """One micro-step of groups of `degree` over 8 rows."""
    groups = world // degree
    return [
        (tuple(range(g * degree, (g + 1) * degree)), tuple(range(g, 8, groups)))
        for g in range(groups)
    ]


def test_the_same_batch_under_every_degree():
    batch = sequences((37, 5, 70, 18, 41, 7, 64, 13))
    plans = [[all_the_same(degree)] for degree in (1, 2, 4, 8)]
    plans.append([[((0, 1, 2, 3), (2, 4, 6)), ((4, 5), (0, 3)), ((6,), (1, 5)), ((7,), (7,))]])
    cases = [(plan, batch) for plan in plans]
    errors = run_world(8, differences, config(), cases, {"dtype": "float64"})[0]
    assert max(max(e) for e in errors) <= 1e-12, errors


def only(labels, length):
    """Labels of a sequence of which only the positions `labels` count."""
    own = np.full(length, IGNORE)
    own[labels] = 7
    return own


def test_shards_and_micro_steps_with_unequal_label_counts():
    ids = sequences((13, 8, 2, 9, 8))
    alone = [((0, 1, 2, 3), (0,))]
    cases = [
        # 13 tokens on 4 ranks: padding.
        ([alone], ids[:1]),
        # 8 tokens on 2 ranks, labels only on tokens 5-8: rank 0 has none but the shifted first.
        ([[((0, 1), (0,))]], [(ids[1][0], only([4, 5, 6, 7], 8))]),
        # The same on 4 ranks beside an idle micro-step for three of them.
        ([alone, [((2,), (1,))]], [(ids[1][0], only([4, 5, 6, 7], 8)), ids[2]]),
        # Micro-steps with 1 and 7 label tokens.
        (
            [[((0, 1), (0,)), ((2,), (1,))], [((0, 2), (2,))]],
            [ids[2], (ids[3][0], only([], 9)), ids[4]],
        ),
        # A rank with one sample beside one with three.
        ([[((0,), (0,)), ((1,), (1,))], [((1,), (2,))], [((1,), (3,))]], ids[:4]),
    ]
    errors = run_world(4, differences, config(), cases, {"dtype": "float64"})[0]
    assert max(max(e) for e in errors) <= 1e-12, errors


def without_labels(rank, world, store, hf_config):
    batch = [(tokens, only([], len(tokens))) for tokens, _ in sequences((9, 5, 6))]
    plan = [[((0, 1), (0, 1))], [((0,), (2,))]]
    ours = engine(rank, world, store, batch, hf_config, dtype="float64")
    before = [p.to_local().clone() for p in ours.model.parameters()]
    communicators = CommunicatorCache(8)
    work = work_of(rank, plan, 0, communicators)
    ours.gangs.apply(work.changes)
    loss, _ = ours.accumulate(work)
    grads = gradients(ours.model.model)
    report = ours.run_step(work_of(rank, plan, 0, communicators, step=2))
    after = [p.to_local() for p in ours.model.parameters()]
    return (
        loss,
        report.loss,
        report.gradient_norm,
        all(g is not None and not g.any() for g in grads.values()),
        all(torch.equal(a, b) for a, b in zip(before, after, strict=True)),
        len(ours.optimizer.state),
    )


def test_a_step_without_any_label_is_zero_and_changes_nothing():
    results = run_world(2, without_labels, config())
    assert results == [(0.0, 0.0, 0.0, True, True, 0)] * 2


def gradients_of_second(rank, world, store, hf_config, batches, plan):
    rows = []
    ours = engine(rank, world, store, rows, hf_config, dtype="float64")
    communicators = CommunicatorCache(8)
    grads = []
    for batch in batches:
        rows[:] = batch
        work = work_of(rank, plan, label_tokens(batch), communicators)
        ours.gangs.apply(work.changes)
        loss, _ = ours.accumulate(work)
        grads.append((loss, gradients(ours.model.model)))
    (loss, first), (other_loss, second) = grads
    return loss == other_loss, all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("degree", [1, 2])
def test_a_document_does_not_see_the_one_before_it(degree):
    a, other, b = sequences((21, 21, 30))
    silent = only([], 21)
    batches = [[(a[0], silent), b], [(other[0], silent), b]]
    plan = [[(tuple(range(degree)), (0, 1))]]
    results = run_world(2, gradients_of_second, config(), batches, plan)
    assert results == [(True, True)] * 2


def packed_logits(rank, world, store, hf_config, batch):
    ours = engine(rank, world, store, batch, hf_config, dtype="float64")
    seen = []
    ours.model.model.lm_head.register_forward_hook(lambda _m, _a, out: seen.append(out.detach()))
    ranks = tuple(range(world))
    work = work_of(
        rank, [[(ranks, tuple(range(len(batch))))]], label_tokens(batch), CommunicatorCache(8)
    )
    ours.gangs.apply(work.changes)
    ours.accumulate(work)
    return seen[0].numpy()  # the second is the backward's recomputation


def test_logits_of_packed_documents_are_those_of_each_alone():
    batch = sequences((11, 3, 20, 1, 16))
    logits = np.concatenate(run_world(4, packed_logits, config(), batch))
    model = reference_model(config(), torch.float64)
    alone = [
        model(input_ids=torch.from_numpy(tokens)[None]).logits[0].detach() for tokens, _ in batch
    ]
    right = torch.cat(alone).numpy()
    assert logits.shape == (52, right.shape[1])  # 51 and one of padding
    assert np.abs(logits[:51] - right).max() <= 1e-12 * np.abs(right).max()


def two_models(rank, world, store, configs, batch):
    """Models with other head counts by turns, over one gang, without parameter sharding."""
    ours = engine(rank, world, store, batch, configs[0], dtype="float64")
    plan = [[((0, 1), tuple(range(len(batch))))]]
    ours.gangs.apply(work_of(rank, plan, 0, CommunicatorCache(8)).changes)
    gang = ours.gangs.get((0, 1))
    models = [reference_model(c, torch.float64, implementation="flexray") for c in configs]
    shard = make_shard(batch, 2, rank)
    total = label_tokens(batch)
    for model in (*models, *models):
        sp = SequenceParallel(gang, shard.borders, "sdpa")
        wrapped = LossModel(model, 16, Stopwatch())
        (wrapped(shard.input_ids, shard.position_ids, shard.labels, sp) / total).backward()
    errors = []
    for hf_config, model in zip(configs, models, strict=True):
        right = reference_model(hf_config, torch.float64)
        reference_loss(right, batch)
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= 2  # every model ran twice
        errors.append(worst_difference(gradients(model), gradients(right)))
    return errors


def test_two_models_with_other_heads_in_one_process():
    configs = [config(heads=8, kv=2), config(heads=4, kv=4)]
    errors = run_world(2, two_models, configs, sequences((12, 9, 20)))[0]
    assert max(errors) <= 1e-12
