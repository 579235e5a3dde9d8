"""Schedules against transformers', AdamW's groups, clipping."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.optimization import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

from flexray.actors.optimizer import adamw, clip
from flexray.actors.schedule import learning_rate
from tests.actors.models import config

PEAK, UPDATES = 3e-3, 23


def transformers_rates(make, **keys):
    """The rate that transformers has after 1, 2, ... steps of its scheduler."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler = make(optimizer, **keys)
    rates = []
    for _ in range(UPDATES):
        optimizer.step()
        scheduler.step()
        rates += scheduler.get_last_lr()
    return rates


THEIRS = {
    "constant": lambda w: transformers_rates(get_constant_schedule_with_warmup, num_warmup_steps=w),
    "linear": lambda w: transformers_rates(
        get_linear_schedule_with_warmup, num_warmup_steps=w, num_training_steps=UPDATES
    ),
    "cosine": lambda w: transformers_rates(
        get_cosine_schedule_with_warmup, num_warmup_steps=w, num_training_steps=UPDATES
    ),
}


@pytest.mark.parametrize("warmup", [0, 1, 6, UPDATES - 1])
@pytest.mark.parametrize("schedule", THEIRS)
def test_schedules_are_those_of_transformers_one_update_earlier(schedule, warmup):
    keys = {"peak": PEAK, "floor": 0.0, "warmup": warmup, "updates": UPDATES}
    ours = [learning_rate(u, schedule=schedule, **keys) for u in range(1, UPDATES + 1)]
    assert ours == pytest.approx(THEIRS[schedule](warmup), rel=1e-12, abs=1e-18)


def test_a_cosine_with_a_floor_is_that_of_transformers_after_warmup():
    right = transformers_rates(
        get_cosine_with_min_lr_schedule_with_warmup,
        num_warmup_steps=6,
        num_training_steps=UPDATES,
        min_lr=4e-4,
    )
    keys = {"peak": PEAK, "floor": 4e-4, "warmup": 6, "updates": UPDATES}
    ours = [learning_rate(u, schedule="cosine", **keys) for u in range(1, UPDATES + 1)]
    # Theirs warms up from the floor; ours from 0.
    assert ours[6:] == pytest.approx(right[6:], rel=1e-12)
    assert ours[:6] == pytest.approx([PEAK * u / 6 for u in range(1, 7)])
    assert ours[-1] == pytest.approx(4e-4)


def test_a_line_with_a_floor():
    keys = {"schedule": "linear", "peak": 1.0, "floor": 0.2, "warmup": 2, "updates": 6}
    assert [learning_rate(u, **keys) for u in range(1, 8)] == pytest.approx(
        [0.5, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]  # and stays there
    )


@pytest.mark.parametrize("tied", [False, True])
def test_matrices_decay_and_norms_and_biases_do_not(tied):
    model = AutoModelForCausalLM.from_config(config("qwen2", tie_word_embeddings=tied))
    optimizer = adamw(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    names = {id(p): name for name, p in model.named_parameters()}
    decay, free = ([names[id(p)] for p in g["params"]] for g in optimizer.param_groups)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0]
    assert all("norm" in name or name.endswith("bias") for name in free)
    assert any(name.endswith("bias") for name in free)
    assert not any("norm" in name or name.endswith("bias") for name in decay)
    assert "model.embed_tokens.weight" in decay
    assert ("lm_head.weight" in decay) != tied  # once, not twice, where it is the same
    assert sorted(decay + free) == sorted(names.values())


def test_decay_is_decoupled_from_the_gradient():
    matrix, norm = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    optimizer = adamw([matrix, norm], betas=(0.9, 0.95), weight_decay=0.1)
    for p, group in zip((matrix, norm), optimizer.param_groups, strict=True):
        p.grad = torch.zeros_like(p)
        group["lr"] = 0.5
    optimizer.step()
    assert torch.allclose(matrix, torch.full((2, 2), 1 - 0.5 * 0.1))
    assert (norm == 1).all()


def test_frozen_parameters_have_no_state():
    frozen = nn.Parameter(torch.ones(3, 3), requires_grad=False)
    trained = nn.Parameter(torch.ones(3, 3))
    optimizer = adamw([frozen, trained], betas=(0.9, 0.95), weight_decay=0.0)
    trained.grad = torch.ones_like(trained)
    optimizer.step()
    assert list(optimizer.state) == [trained]


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_clipping_is_that_of_torch(scale):
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.zeros(n, 3)) for n in (1, 4, 7)]
    for p in ours[:2]:
        p.grad = torch.randn_like(p) * scale
    theirs = [nn.Parameter(torch.zeros_like(p)) for p in ours]
    for p, q in zip(ours, theirs, strict=True):
        q.grad = None if p.grad is None else p.grad.clone()
    right = torch.nn.utils.clip_grad_norm_(theirs, 0.7)
    assert clip(ours, 0.7) == pytest.approx(float(right))
    for p, q in zip(ours[:2], theirs[:2], strict=True):
        assert torch.equal(p.grad, q.grad)
    assert ours[2].grad is None
