"""Failures of numbers and collectives that people reported in public, one test a line.

Lines that are held elsewhere: groups leak (pytorch#40400, Megatron#6897) in
tests/actors/test_gangs.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from flexray.actors.attention.ulysses import SequenceParallel, attend
from flexray.actors.gang import Gang
from flexray.actors.loss import LossModel
from flexray.actors.pack import IGNORE, INT32_MAX, Borders, make_shard
from flexray.actors.timing import Stopwatch
from flexray.actors.work import slices
from flexray.solver.cluster import Cluster
from flexray.solver.communicators import CommunicatorCache
from flexray.solver.cost import CostModel
from flexray.solver.planner import Effort, plan_step
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
from tests.actors.test_gradients import differences
from tests.worlds import run_world

EXACT = {"dtype": "float64"}


def only(labels, length):
    """Labels of a sequence of which only the positions `labels` count."""
    own = np.full(length, IGNORE)
    own[labels] = 7
    return own


def cases():
    """(plan, batch) by the report that it comes from; 4 ranks."""
    ids = sequences((13, 8, 2, 9, 8))
    everybody = (0, 1, 2, 3)
    silent = (ids[3][0], only([], 9))
    uneven = plan_step(
        (100, 100, 900, 900),
        CostModel(quadratic=1e-5, linear=1e-3, tokens_per_gpu=450),
        Cluster.uniform(4),
        effort=Effort(evaluations=20_000, nodes=0),
    )
    return {
        "transformers#34191": (
            [[((0, 1), (0,)), ((2,), (1,))], [((0, 2), (2,))]],
            [ids[2], silent, ids[4]],
        ),
        "transformers#41832": ([[((0, 1), (0,))]], [(ids[1][0], only([4, 5, 6, 7], 8))]),
        "DeepSpeed#5177": ([[(everybody, (0,))]], ids[:1]),
        "verl#6176": (
            [[(g.ranks, g.rows) for g in m.groups] for m in uneven.micro_steps],
            sequences((100, 100, 900, 900)),
        ),
        "EasyR1#11004": (
            [[((0,), (0,)), ((1,), (1,))], [((1,), (2,))], [((1,), (3,))]],
            ids[:4],
        ),
        "TorchSpec#126": ([[((0,), (0,)), ((1,), (1,))]], [silent, ids[0]]),
    }


@pytest.fixture(scope="module")
def errors():
    """Relative errors of gradients and loss against one process, by report."""
    named = cases()
    found = run_world(4, differences, config(), list(named.values()), EXACT)[0]
    return dict(zip(named, found, strict=True))


def test_mean_of_means_under_gradient_accumulation(errors):
    """transformers#34191: micro-steps with 1 and 7 label tokens weigh as one batch's."""
    _, batch = cases()["transformers#34191"]
    assert [label_tokens([row]) for row in batch] == [1, 0, 7]
    assert max(errors["transformers#34191"]) <= 1e-12


def all_the_same(degree, world=8):
    """One micro-step of groups of `degree` over 8 rows."""
    groups = world // degree
    return [
        (tuple(range(g * degree, (g + 1) * degree)), tuple(range(g, 8, groups)))
        for g in range(groups)
    ]


def test_loss_differs_with_accumulation_and_ulysses():
    """verl#2857: the same batch under degrees 1, 2, 4, 8 and the plans {8} and {4,2,1,1}."""
    batch = sequences((37, 5, 70, 18, 41, 7, 64, 13))
    plans = [[all_the_same(degree)] for degree in (1, 2, 4, 8)]
    plans.append([[((0, 1, 2, 3), (2, 4, 6)), ((4, 5), (0, 3)), ((6,), (1, 5)), ((7,), (7,))]])
    found = run_world(8, differences, config(), [(plan, batch) for plan in plans], EXACT)[0]
    assert max(max(e) for e in found) <= 1e-12, found


def test_shards_with_unequal_label_counts(errors):
    """transformers#41832: 8 tokens on 2 ranks, labels only on tokens 5 to 8."""
    _, batch = cases()["transformers#41832"]
    # After the shift token 4 predicts token 5: one label token on rank 0, three on rank 1.
    assert [make_shard(batch, 2, rank).label_tokens for rank in (0, 1)] == [1, 3]
    assert max(errors["transformers#41832"]) <= 1e-12


def test_length_not_divisible_by_the_degree(errors):
    """DeepSpeed#5177: 13 tokens on 4 ranks."""
    assert max(errors["DeepSpeed#5177"]) <= 1e-12


def test_micro_step_counts_differ_between_ranks(errors):
    """verl#6176: [100, 100] beside [900, 900]: every rank makes the same number of collectives."""
    assert max(errors["verl#6176"]) <= 1e-12


def test_synchronised_count_exceeds_a_ranks_samples(errors):
    """EasyR1#11004: one sample beside three: a dummy without weight."""
    assert max(errors["EasyR1#11004"]) <= 1e-12


def test_one_rank_skips_an_unlabelled_sample(errors):
    """TorchSpec#126: nobody skips by itself: the plan decides for all."""
    assert max(errors["TorchSpec#126"]) <= 1e-12


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


def test_all_labels_ignored_spreads_nan():
    """VeOmni: loss 0, finite gradients, and no parameter changes."""
    results = run_world(2, without_labels, config())
    assert results == [(0.0, 0.0, 0.0, True, True, 0)] * 2


def gradients_of(rank, world, store, hf_config, batches, plan):
    """Whether all batches have the first one's loss and gradients, bit for bit."""
    rows = []
    ours = engine(rank, world, store, rows, hf_config, dtype="float64")
    communicators = CommunicatorCache(8)
    found = []
    for batch in batches:
        rows[:] = batch
        work = work_of(rank, plan, label_tokens(batch), communicators)
        ours.gangs.apply(work.changes)
        loss, _ = ours.accumulate(work)
        found.append((loss, gradients(ours.model.model)))
    (loss, first), *others = found
    return all(
        loss == other and all(torch.equal(first[name], grads[name]) for name in first)
        for other, grads in others
    )


@pytest.mark.parametrize("degree", [1, 2])
def test_packed_samples_attend_across_borders(degree):
    """trl#3526, LlamaFactory#4224: document A changes, and B's loss and gradients do not."""
    a, other, b = sequences((21, 21, 30))
    silent = only([], 21)
    batches = [[(a[0], silent), b], [(other[0], silent), b]]
    plan = [[(tuple(range(degree)), (0, 1))]]
    assert run_world(2, gradients_of, config(), batches, plan) == [True, True]


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


def test_document_borders_are_dropped():
    """axolotl#3608: 5 packed documents have the logits of each alone."""
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


def test_head_counts_are_kept_process_wide():
    """DeepSpeed#8316: two models with different heads in one process are both right."""
    configs = [config(heads=8, kv=2), config(heads=4, kv=4)]
    errors = run_world(2, two_models, configs, sequences((12, 9, 20)))[0]
    assert max(errors) <= 1e-12


def test_cu_seqlens_are_taken_from_shard_local_positions():
    """prime-rl#2392: rank 1 of a pack of 1024 and 2048 tokens has the pack's borders."""
    shards = [make_shard(sequences((1024, 2048)), 2, rank) for rank in (0, 1)]
    assert [s.borders.cu_seqlens for s in shards] == [(0, 1024, 3072)] * 2
    # Rank 1's positions go on where rank 0's stop, inside the second sequence.
    assert shards[0].position_ids[0, [0, 1023, 1024, 1535]].tolist() == [0, 1023, 0, 511]
    assert shards[1].position_ids[0, [0, -1]].tolist() == [512, 2047]


def test_more_tokens_than_cu_seqlens_gives_nan_gradients():
    """pytorch#188933: refused."""
    x = torch.randn(9, 8, 8)
    sp = SequenceParallel(Gang((0,), 0, None, Stopwatch()), Borders([8]), "sdpa")
    with pytest.raises(ValueError, match=r"9 tokens .* cu_seqlens ends at 8"):
        attend(x, x, x, sp, 1.0)


def test_total_tokens_of_a_pack_overflow_int32():
    """2^31 - 1 is the most that cu_seqlens addresses: more is refused before it is built."""
    with pytest.raises(ValueError, match=f"over {INT32_MAX}"):
        Borders([2**30, 2**30])


def test_every_rank_of_a_plan_has_as_many_micro_steps():
    """verl#6176 at its root: the part of an idle rank is a micro-step too."""
    plan = plan_step(
        (100, 100, 900, 900),
        CostModel(quadratic=1e-5, linear=1e-3, tokens_per_gpu=900),
        Cluster.uniform(4),
        effort=Effort(evaluations=20_000, nodes=0),
    )
    parts = slices(plan, (0, 1, 2, 3), world=4, step=1, generation=0, label_tokens=1, changes=())
    assert {len(part.micro_steps) for part in parts} == {len(plan.micro_steps)}


def test_a_communicator_takes_memory():
    """nccl#964: 544 to 688 MB each: the memory model has that term."""
    cost = CostModel(1e-5, 1e-3, usable_mb=10_000, mb_per_token=1.0)
    four = CostModel(
        1e-5, 1e-3, usable_mb=10_000, mb_per_token=1.0, communicator_mb=600, communicators=4
    )
    assert cost.capacity(8) - four.capacity(8) == 2400
