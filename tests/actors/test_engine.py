"""What the engine does beside gradients: evaluation, counters, updates that are not made."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from flexray.actors.engine import StaleGeneration, StepMismatch
from flexray.solver.communicators import CommunicatorCache
from tests.actors.models import (
    config,
    engine,
    label_tokens,
    reference_loss,
    reference_model,
    sequences,
    work_of,
)
from tests.worlds import run_world

BATCH = sequences((37, 5, 60, 18, 1))
PLAN = [[((0, 1), (0, 2)), ((2,), (1,))], [((1,), (3, 4))]]


def state(ours):
    """Copies of this rank's parameters and optimizer state, in order."""
    held = [*ours.model.parameters()]
    held += [x for values in ours.optimizer.state.values() for x in values.values()]
    return [(x.to_local() if isinstance(x, DTensor) else x).detach().numpy().copy() for x in held]


def unchanged(before, after):
    return len(before) == len(after) and all(map(np.array_equal, before, after))


def step(ours, rank, communicators, number):
    total = label_tokens(BATCH)
    return ours.run_step(work_of(rank, PLAN, total, communicators, step=number))


def evaluations(rank, world, store, checkpointing):
    """An evaluation between steps: its loss, and whether it left anything behind."""
    keys = {"dtype": "float64", "loss_chunk": 16, "activation_checkpointing": checkpointing}
    ours = engine(rank, world, store, BATCH, config(), **keys)
    communicators = CommunicatorCache(4)
    total = label_tokens(BATCH)
    graphs = []
    hook = ours.model.register_forward_hook(lambda _m, _a, loss: graphs.append(loss.requires_grad))
    first = ours.evaluate(work_of(rank, PLAN, total, communicators, step=0))
    hook.remove()
    losses = [step(ours, rank, communicators, 1).loss]
    before, counters = state(ours), ours.counters()
    second = ours.evaluate(work_of(rank, PLAN, total, communicators, step=1))
    kept = (
        unchanged(before, state(ours))
        and all(isinstance(p, DTensor) and p.grad is None for p in ours.model.parameters())
        and counters == ours.counters()
    )
    losses += [step(ours, rank, communicators, n).loss for n in (2, 3)]
    third = ours.evaluate(work_of(rank, PLAN, total, communicators, step=3))
    kept &= graphs == [False] * len(PLAN)  # no activations for a backward
    return first, second.loss, third.loss, losses, kept


def steps_without_evaluation(rank, world, store):
    ours = engine(rank, world, store, BATCH, config(), dtype="float64", loss_chunk=16)
    communicators = CommunicatorCache(4)
    return [step(ours, rank, communicators, n).loss for n in (1, 2, 3, 4)]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_an_evaluation_is_the_loss_of_one_process_and_changes_nothing(checkpointing):
    results = run_world(3, evaluations, checkpointing)
    first, second, third, losses, kept = results[0]
    assert kept
    right = reference_loss(reference_model(config(), torch.float64), BATCH).item()
    assert abs(first.loss - right) <= 1e-12 * right
    assert (first.step, first.label_tokens, first.new_communicators) == (0, 116, 1)
    plain = run_world(3, steps_without_evaluation)[0]
    assert losses == plain[:3]  # bit for bit, evaluations in between
    # The step that follows an update sees the loss that the evaluation saw.
    assert (second, third) == (losses[1], plain[3])
    assert all(r[1:] == results[0][1:] for r in results)


def evaluations_refused(rank, world, store):
    ours = engine(rank, world, store, BATCH, config())
    said = []
    for keys, total in (({"generation": 1}, 116), ({}, 115)):
        try:
            ours.evaluate(
                work_of(rank, [[((0,), (0, 1, 2, 3))]], total, CommunicatorCache(1), **keys)
            )
        except (StaleGeneration, StepMismatch) as error:
            said.append(str(error))
    return said, all(isinstance(p, DTensor) for p in ours.model.parameters())


def test_an_evaluation_of_another_generation_or_other_rows_is_refused():
    for (stale, mismatch), sharded in run_world(2, evaluations_refused):
        assert stale == "work for generation 1 in generation 0"
        assert "115 label tokens were planned and 116 were read" in mismatch
        assert sharded


def planted(rank, world, store, bad):
    """Step 2 has a gradient that is not finite in one entry that rank 1 holds; step 3 is right."""
    ours = engine(rank, world, store, BATCH, config(), dtype="float64", schedule="linear", steps=4)
    communicators = CommunicatorCache(4)
    reports = [step(ours, rank, communicators, 1)]
    before = state(ours)
    plain = ours.accumulate

    def accumulate(work):
        found = plain(work)
        if rank == 1:
            list(ours.model.parameters())[3].grad.to_local().view(-1)[5] = bad
        return found

    ours.accumulate = accumulate
    reports += [step(ours, rank, communicators, 2), step(ours, rank, communicators, 2)]
    kept = unchanged(before, state(ours))
    counters = [ours.counters()]
    ours.accumulate = plain
    reports.append(step(ours, rank, communicators, 2))
    counters.append(ours.counters())
    return kept, counters, [(r.skipped, r.loss, r.learning_rate) for r in reports], state(ours)


def two_steps(rank, world, store):
    ours = engine(rank, world, store, BATCH, config(), dtype="float64", schedule="linear", steps=4)
    communicators = CommunicatorCache(4)
    reports = [step(ours, rank, communicators, n) for n in (1, 2)]
    return [(r.skipped, r.loss, r.learning_rate) for r in reports], state(ours)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_is_skipped_by_every_rank(bad):
    results = run_world(3, planted, bad)
    undisturbed = run_world(3, two_steps)
    for (kept, counters, reports, after), (right, right_after) in zip(
        results, undisturbed, strict=True
    ):
        assert kept
        assert counters == [{"updates": 1}, {"updates": 2}]
        # Nothing is left of the two steps: the third is the one that would have been.
        assert [skipped for skipped, _, _ in reports] == [False, True, True, False]
        assert [reports[0], reports[3]] == right
        assert unchanged(after, right_after)


def counted_again(rank, world, store):
    ours = engine(rank, world, store, BATCH, config(), schedule="linear", steps=10)
    ours.set_counters({"updates": 7, "skipped": 2})  # as older checkpoints have it
    counters = ours.counters()
    return counters, step(ours, rank, CommunicatorCache(4), 8).learning_rate


def test_counters_that_are_set_move_the_schedule():
    counters, rate = run_world(3, counted_again)[0]
    assert counters == {"updates": 7}
    assert rate == pytest.approx(1e-3 * 0.2)
