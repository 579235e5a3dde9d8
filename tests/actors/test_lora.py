"""Adapters: gradients and curves of one process with PEFT; the rest stays as it is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.tensor import DTensor

from flexray.actors.lora import Lora, add_adapters, merge, plain_name, random_adapters
from flexray.actors.model import ModelRefused, build_on_meta
from flexray.actors.sharding import own_rows, rows_of
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
from tests.actors.test_gradients import LENGTHS, PLAN, TOLERANCE
from tests.actors.test_model import EXPERTS
from tests.worlds import run_world

LORA = Lora(rank=3, alpha=12.0)
SOME = Lora(rank=4, alpha=4.0, targets=("q_proj", "mlp.down_proj"))
ATTENTION = Lora(rank=4, alpha=4.0, targets=("q_proj", "v_proj", "o_proj"))


def reference(hf_config, lora, dtype):
    """The model in one process, with PEFT used as its own documentation does."""
    model = reference_model(hf_config, dtype)
    targets = list(lora.targets or ("q_proj", "k_proj", "v_proj", "o_proj"))
    if lora.targets is None:
        targets += ["gate_proj", "up_proj", "down_proj"]
    settings = LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, task_type="CAUSAL_LM"
    )
    model = get_peft_model(model, settings, autocast_adapter_dtype=False).to(dtype).train()
    own = adapters(model)
    with torch.no_grad():
        for name, value in random_adapters(model.base_model.model, 0):
            own[name].copy_(value)
    return model


def adapters(model):
    """Trained parameters by their names in the model without PEFT's wrapper."""
    return {
        name.removeprefix("base_model.model."): p
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def disturbed(parameters):
    """Fills every adapter, so that none has a gradient of zero: at the start B is zero."""
    with torch.no_grad():
        for name, p in sorted(parameters.items()):
            random = np.random.default_rng(len(name) + p.shape[0])
            value = torch.from_numpy(random.normal(0, 0.1, tuple(p.shape)))
            own_rows(p).copy_(value[rows_of(p)])


def compared(rank, world, store, cases, plan):
    """Relative errors of adapters' gradients, loss and norm, one engine a case."""
    batch = sequences(LENGTHS)
    found = []
    for number, (hf_config, settings) in enumerate(cases):
        own = dist.PrefixStore(str(number), store)
        keys = {"loss_chunk": 16, **settings}
        ours = engine(rank, world, own, batch, hf_config, generation=number, **keys)
        disturbed(adapters(ours.model.model))
        total = label_tokens(batch)
        work = work_of(rank, plan, total, CommunicatorCache(8), generation=number)
        ours.gangs.apply(work.changes)
        loss, _ = ours.accumulate(work)
        frozen = [p for p in ours.model.parameters() if not p.requires_grad]
        assert frozen and all(p.grad is None for p in frozen)
        grads = {n: p.grad.full_tensor().clone() for n, p in adapters(ours.model.model).items()}
        norm = ours.update()
        model = reference(hf_config, settings["lora"], ours.settings.compute_dtype)
        disturbed(adapters(model))
        right = reference_loss(model, batch).item()
        right_grads = {name: p.grad for name, p in adapters(model).items()}
        right_norm = torch.stack([g.double().norm() for g in right_grads.values()]).norm().item()
        found.append(
            (
                worst_difference(grads, right_grads),
                abs(loss - right) / right,
                abs(norm - right_norm) / right_norm,
            )
        )
        ours.leave()
    return found


def all_on_groups_of(degree):
    """One micro-step of groups of `degree` over four ranks and all rows."""
    rows = range(len(LENGTHS))
    groups = 4 // degree
    return [
        [
            (tuple(range(g * degree, (g + 1) * degree)), tuple(rows[g::groups]))
            for g in range(groups)
        ]
    ]


# {4}, then {2, 1, 1}, then {2} beside idle ranks; and every degree by itself.
@pytest.mark.parametrize("plan", [PLAN, *map(all_on_groups_of, (1, 2, 4))])
def test_gradients_of_adapters_are_those_of_one_process(plan):
    cases = [(config(), {"dtype": "float64", "lora": LORA})]
    if plan is PLAN:
        cases += [
            (config("qwen2", tie_word_embeddings=True), {"dtype": "float64", "lora": SOME}),
            (config("qwen3"), {"dtype": "float64", "lora": LORA, "activation_checkpointing": True}),
            (config(), {"dtype": "float64", "lora": LORA, "shard_size": 2}),
            (config(), {"dtype": "float32", "lora": LORA}),
            (config("mixtral", **EXPERTS["mixtral"]), {"dtype": "float32", "lora": ATTENTION}),
        ]
    for case, found in zip(cases, run_world(4, compared, cases, plan)[0], strict=True):
        assert max(found) <= TOLERANCE[case[1]["dtype"]], (case, found)


STEPS = 10


def curve(rank, world, store, settings):
    batch = sequences(LENGTHS)
    ours = engine(rank, world, store, batch, config(), lora=LORA, loss_chunk=16, **settings)
    start = [p.to_local().detach().clone() for p in ours.model.parameters()]
    communicators = CommunicatorCache(8)
    plans = [PLAN, *map(all_on_groups_of, (1, 2, 4))]
    reports = [
        ours.run_step(work_of(rank, plans[step % 4], label_tokens(batch), communicators, step=step))
        for step in range(STEPS)
    ]
    end = [p.to_local().detach() for p in ours.model.parameters()]
    trained = [p.requires_grad for p in ours.model.parameters()]
    return (
        [r.loss for r in reports],
        [r.gradient_norm for r in reports],
        [torch.equal(a, b) for a, b in zip(start, end, strict=True)],
        trained,
        len(ours.optimizer.state),
        {str(p.dtype) for p in ours.model.parameters() if not p.requires_grad},
        {str(p.dtype) for p in ours.model.parameters() if p.requires_grad},
        all(isinstance(p, DTensor) for p in ours.model.parameters()),
        all(buffer.isfinite().all() for buffer in ours.model.buffers()),
    )


RECIPE = {"learning_rate": 1e-2, "clip_norm": 0.05, "weight_decay": 0.1}


def test_ten_steps_are_those_of_one_process_and_the_rest_is_frozen():
    model = reference(config(), LORA, torch.float64)
    own = list(adapters(model).values())
    optimizer = torch.optim.AdamW(own, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    right = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = reference_loss(model, sequences(LENGTHS)).item()
        right.append((loss, torch.nn.utils.clip_grad_norm_(own, 0.05).item()))
        optimizer.step()
    losses, norms, same, trained, states, frozen, masters, sharded, finite = run_world(
        4, curve, {"dtype": "float64", **RECIPE}
    )[0]
    np.testing.assert_allclose(losses, [loss for loss, _ in right], rtol=1e-10)
    np.testing.assert_allclose(norms, [norm for _, norm in right], rtol=1e-10)
    assert losses[-1] < losses[0] - 0.1
    # Bit for bit: all that is frozen stays, all that is trained moves. (Ranks without a row of a
    # small adapter hold none.)
    assert all(equal for equal, moves in zip(same, trained, strict=True) if not moves)
    assert not any(equal for equal, moves in zip(same, trained, strict=True) if moves)
    assert states == sum(trained) == 2 * 2 * 7  # A and B, two layers, seven linear layers in each
    assert (frozen, masters) == ({"torch.float64"}, {"torch.float64"})
    assert sharded and finite


def test_bfloat16_keeps_the_base_in_bfloat16_and_adapters_in_float32():
    exact = run_world(4, curve, {"dtype": "float32", **RECIPE})[0]
    half = run_world(4, curve, {"dtype": "bfloat16", **RECIPE})[0]
    assert exact[5:7] == ({"torch.float32"}, {"torch.float32"})
    assert half[5:7] == ({"torch.bfloat16"}, {"torch.float32"})
    assert half[0] != exact[0]
    np.testing.assert_allclose(half[0], exact[0], rtol=0.02)


def whole(rank, world, store, folder, seeds):
    """Whole adapters by seed, and whole base parameters by plain name."""
    found = []
    for number, seed in enumerate(seeds):
        own = dist.PrefixStore(str(number), store)
        ours = engine(rank, world, own, [], config(), lora=SOME, weights=folder, seed=seed)
        model = ours.model.model
        found.append(
            {plain_name(n): p.full_tensor().detach().numpy() for n, p in model.named_parameters()}
        )
        ours.leave()
    return found


def test_values_do_not_depend_on_the_world_and_the_base_is_the_files(tmp_path):
    saved = reference_model(config(), torch.float32, seed=9)
    saved.save_pretrained(tmp_path)
    base = {name: p.detach().numpy() for name, p in saved.named_parameters()}
    alone, other = run_world(1, whole, tmp_path, (0, 1))[0]
    for rank in run_world(3, whole, tmp_path, (0,)):
        assert rank[0].keys() == alone.keys()
        assert all((rank[0][name] == alone[name]).all() for name in alone)
    assert all((alone[name] == value).all() for name, value in base.items())
    own = alone.keys() - base.keys()
    assert len(own) == 2 * 2 * 2
    for name in own:
        if "lora_A" in name:
            bound = alone[name].shape[1] ** -0.5
            assert 0.9 * bound < abs(alone[name]).max() <= bound  # PEFT's
            assert (alone[name] != other[name]).all()
        else:
            assert not alone[name].any()
    a, b = (alone[f"model.layers.{i}.self_attn.q_proj.lora_A.default.weight"] for i in (0, 1))
    assert (a != b).all()


@pytest.mark.parametrize("frozen", [torch.float64, torch.bfloat16])
def test_merged_weights_compute_what_the_adapted_model_does(frozen):
    model = reference(config("qwen2", tie_word_embeddings=True), LORA, torch.float64)
    own = adapters(model)
    disturbed(own)
    base = {
        plain_name(name.removeprefix("base_model.model.")): p
        for name, p in model.named_parameters()
        if not p.requires_grad
    }
    merged = dict(merge(base.items(), own, LORA, frozen=frozen))
    plain = reference_model(config("qwen2", tie_word_embeddings=True), torch.float64, seed=5)
    with torch.no_grad():
        for name, p in plain.named_parameters():
            p.copy_(merged.pop(name))
        for p in base.values():
            p.copy_(p.to(frozen))
        assert not merged
        ids = torch.from_numpy(sequences((40,))[0][0])[None]
        right, found = model(ids).logits, plain(ids).logits
    assert (found - right).abs().max() <= 1e-12 * right.abs().max()


def test_adapters_of_another_model_are_not_merged():
    layer = {f"model.layers.9.lora_{part}.default.weight": torch.zeros(3, 3) for part in "AB"}
    with pytest.raises(ModelRefused, match=r"no layer for model\.layers\.9\.lora_A"):
        list(merge([("model.norm.weight", torch.ones(3))], layer, LORA, frozen=torch.float32))


def spans(rank, world, store, lora):
    """How often own work was timed in a micro-step."""
    batch = sequences(LENGTHS)
    ours = engine(rank, world, store, batch, config(), lora=lora)
    read, seen = ours.watch.read, []
    ours.watch.read = lambda: seen.append(len(ours.watch._spans["own_work"])) or read()
    work = work_of(rank, PLAN, label_tokens(batch), CommunicatorCache(8))
    report = ours.run_step(work)
    return seen, min(part.wait_ms for part in report.micro_steps)


def test_every_layers_own_work_is_timed_forward_and_backward():
    for lora in (None, LORA):  # two layers and the loss; the first layer's input is frozen
        assert all(s == [6, 6, 6] and w >= 0 for s, w in run_world(4, spans, lora)), lora


def test_layers_that_peft_takes_for_others_are_one_line():
    """PEFT reads gate_proj of a GLM as the fused experts' parameter, not the dense layer."""
    glm = config("glm4_moe", **EXPERTS["glm4_moe"])

    def adapt(targets):
        add_adapters(build_on_meta(glm, torch.float32), Lora(4, 4.0, targets), master=torch.float32)

    for targets in (None, ("gate_proj",)):
        with pytest.raises(ModelRefused, match=r"^model\.lora: PEFT gives .* of glm4_moe") as error:
            adapt(targets)
        assert "\n" not in str(error.value)
    adapt(("q_proj",))


@pytest.mark.parametrize(
    "target, hint",
    [
        ("qproj", "did you mean q_proj?"),
        ("lm_head", "(down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj)"),
        ("proj", "proj is no linear layer"),
        ("input_layernorm", "is no linear layer of this model's decoder layers"),
    ],
)
def test_targets_that_are_no_linear_layers_are_one_line(target, hint):
    model = build_on_meta(config(), torch.float32)
    with pytest.raises(ModelRefused) as refusal:
        add_adapters(model, Lora(4, 4.0, ("q_proj", target)), master=torch.float32)
    assert str(refusal.value).startswith(f"model.lora.targets: {target} ")
    assert hint in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_gradient_that_peft_scales_otherwise_is_seen():
    """The comparison above is not blind to alpha: another one is far outside its tolerance."""
    batch = sequences((30, 9))
    grads = []
    for alpha in (12.0, 12.1):
        model = reference(config(), Lora(3, alpha), torch.float64)
        disturbed(adapters(model))
        reference_loss(model, batch)
        grads.append(gradients_of(model))
    assert worst_difference(*grads) > 1e-4


def gradients_of(model):
    return {n: g for n, g in gradients(model).items() if g is not None}
