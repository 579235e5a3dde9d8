"""Training under a new plan for every step is training in one process."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch

from flexray.actors.settings import EngineSettings
from flexray.actors.work import slices
from flexray.solver.cluster import Cluster
from flexray.solver.communicators import CommunicatorCache
from flexray.solver.cost import CostModel
from flexray.solver.planner import Effort, plan_step
from tests.actors.models import (
    VOCAB,
    config,
    engine,
    label_tokens,
    reference_loss,
    reference_model,
)
from tests.worlds import run_world

WORLD, STEPS, ROWS = 4, 20, 12
MODEL = {"tie_word_embeddings": True}
RECIPE = {
    "schedule": "cosine",
    "warmup_steps": 5,
    "learning_rate": 3e-3,
    "min_learning_rate": 3e-4,
    "steps": STEPS,
    "clip_norm": 0.5,
    "weight_decay": 0.1,
}


def rows_of_all_steps():
    """Long-tailed lengths, each token the one before plus one; step 3 has nothing to predict."""
    random = np.random.default_rng(1)
    lengths = np.clip(random.lognormal(2.7, 1.0, STEPS * ROWS), 1, 150).astype(int)
    rows = [((random.integers(VOCAB) + np.arange(n)) % VOCAB, None) for n in lengths]
    for row in range(2 * ROWS, 3 * ROWS):
        tokens, _ = rows[row]
        rows[row] = (tokens, np.full(len(tokens), -100))
    return rows


def on_other_ranks(plan, ranks):
    """The planner aligns its groups; here they are all over the place."""
    return replace(
        plan,
        micro_steps=tuple(
            replace(
                m,
                groups=tuple(
                    replace(g, ranks=tuple(sorted(ranks[r] for r in g.ranks))) for g in m.groups
                ),
            )
            for m in plan.micro_steps
        ),
    )


def planned(rows):
    """The parts of all ranks, step by step, each planned under another cost model."""
    random = np.random.default_rng(2)
    communicators = CommunicatorCache(2)
    work, summaries = [], []
    for step in range(1, STEPS + 1):
        ids = tuple(range((step - 1) * ROWS, step * ROWS))
        cost = CostModel(
            quadratic=float(10 ** random.uniform(-6, -2)),
            linear=float(10 ** random.uniform(-3, 0)),
            micro_step_ms=float(random.uniform(0, 3)),
            exchange_ms=float(random.uniform(0, 3)),
            tokens_per_gpu=int(random.integers(38, 90)),
        )
        plan = plan_step(
            [len(rows[row][0]) for row in ids],
            cost,
            Cluster.uniform(WORLD),
            effort=Effort(evaluations=20_000, nodes=0),
        )
        plan = on_other_ranks(plan, random.permutation(WORLD).tolist())
        groups = [group.ranks for m in plan.micro_steps for group in m.groups]
        work.append(
            slices(
                plan,
                ids,
                world=WORLD,
                step=step,
                generation=0,
                label_tokens=label_tokens([rows[row] for row in ids]),
                changes=communicators.prepare(groups),
            )
        )
        summaries.append(plan.summary)
    return work, summaries


def train(rank, world, store, rows, work, settings):
    ours = engine(rank, world, store, rows, config(**MODEL), loss_chunk=16, **settings)
    reports = [ours.run_step(parts[rank]) for parts in work]
    parameters = {n: p.full_tensor().detach() for n, p in ours.model.model.named_parameters()}
    return (
        [report.loss for report in reports],
        [report.gradient_norm for report in reports],
        {name: value.numpy() for name, value in parameters.items()} if rank == 0 else None,
    )


def train_in_one_process(rows):
    """The same recipe, written plainly."""
    model = reference_model(config(**MODEL), torch.float64)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ],
        betas=EngineSettings(config()).betas,
    )
    losses, norms, updates = [], [], 0
    for step in range(1, STEPS + 1):
        batch = rows[(step - 1) * ROWS : step * ROWS]
        optimizer.zero_grad()
        losses.append(reference_loss(model, batch).item())
        if label_tokens(batch) == 0:
            norms.append(0.0)
            continue
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, RECIPE["clip_norm"]).item())
        updates += 1  # a step without a label moves no schedule
        warmup, low, high = (
            RECIPE[k] for k in ("warmup_steps", "min_learning_rate", "learning_rate")
        )
        if updates < warmup:
            rate = high * updates / warmup
        else:
            half_turn = math.pi * (updates - warmup) / (STEPS - warmup)
            rate = low + (high - low) * (1 + math.cos(half_turn)) / 2
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    values = {n: p.detach().numpy() for n, p in model.named_parameters()}
    return np.array(losses), np.array(norms), values


def test_twenty_steps_under_changing_plans_are_the_curve_of_one_process():
    torch.set_num_threads(1)
    rows = rows_of_all_steps()
    work, summaries = planned(rows)
    assert len(set(summaries)) >= 5, summaries  # the plans do differ
    degrees = {len(m.ranks) for parts in work for part in parts for m in part.micro_steps}
    assert degrees == {1, 2, 4}
    assert any(not change.create for parts in work for change in parts[0].changes)

    results = run_world(WORLD, train, rows, work, {"dtype": "float64", **RECIPE})
    assert all(losses == results[0][0] for losses, _, _ in results)
    losses, norms, values = results[0]
    right_losses, right_norms, right_values = train_in_one_process(rows)
    assert right_losses[2] == 0
    np.testing.assert_allclose(losses, right_losses, rtol=1e-10)
    np.testing.assert_allclose(norms, right_norms, rtol=1e-10)
    assert (right_norms > RECIPE["clip_norm"]).any()  # clipping did something
    assert right_losses[-1] < right_losses[0] - 0.3  # and so did training
    for name, right in right_values.items():
        np.testing.assert_allclose(values[name], right, rtol=0, atol=1e-10 * abs(right).max())


def test_bfloat16_trains_like_float32():
    rows = rows_of_all_steps()
    work, _ = planned(rows)
    work = work[:8]
    exact, _, _ = run_world(WORLD, train, rows, work, {"dtype": "float32", **RECIPE})[0]
    half, norms, values = run_world(WORLD, train, rows, work, {"dtype": "bfloat16", **RECIPE})[0]
    assert all(value.dtype == np.float32 for value in values.values())  # master weights
    assert half != exact
    assert np.isfinite(norms).all()
    np.testing.assert_allclose(half, exact, rtol=0.02)
