"""What is refused before a GPU is asked for, and the first cost model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flexray import estimate
from flexray.actors.lora import Lora
from flexray.actors.worker import Place
from flexray.config import ClusterSection, load_config
from flexray.datasets.annotate import annotate
from flexray.errors import UserError
from flexray.preparation import prepare
from flexray.ray_cluster import ranks_of
from flexray.solver.plan import PlanningError


def job(*overrides):
    return prepare(load_config(None, list(overrides)))


def places(*nodes, memory_mb=4096.0, device_name=""):
    return tuple(
        Place(pid, node, "0", device_name, memory_mb, cores=2) for pid, node in enumerate(nodes)
    )


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("model.config.attention_dropout=0.1", "attention_dropout=0.1 is not supported"),
        ("model.config.model_type=lama", "did you mean llama?"),
        ("model.config.num_hiden_layers=3", "did you mean num_hidden_layers?"),
        ("model.config.hidden_size=wide", "'hidden_size' expected int, got str (value: 'wide')"),
        ("model.config.num_attention_heads=5", "not a multiple of the number of attention heads"),
        ("model.config.vocab_size=100", "set model.config.vocab_size"),
        ("model.path=/nowhere", "model.path=/nowhere: no such folder"),
        ("model.config.rope_parameters={rope_type: llama3, rope_theta: 1.0e4}", "missing key"),
    ],
)
def test_a_model_that_cannot_be_trained_is_one_line(setting, words):
    with pytest.raises(UserError) as error:
        job(setting)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_the_longest_row_must_fit_the_smallest_cluster():
    few = job("planner.capacity=1024", "cluster.min_gpus=2")
    cost = few.cost(places(*"aaaa"))
    with pytest.raises(PlanningError, match=r"longest sequence \(3072 tokens\).*fit 2 GPUs"):
        few.fewest(cost, places(*"aaaa"))
    enough = job("planner.capacity=1024", "cluster.min_gpus=4")
    assert enough.fewest(cost, places(*"aaaa")) == 4


@pytest.mark.parametrize(
    ("capacity", "settings", "fewest"),
    [
        (3072, (), 1),
        (1600, (), 2),
        (1024, (), 4),  # 3 are enough tokens, but 3 is no degree
        (3072, ("cluster.min_gpus=3",), 3),
        (3072, ("cluster.shard_size=2",), 2),
        (1600, ("planner.degrees=[4]",), 4),
    ],
)
def test_a_run_may_go_on_with_as_few_as_hold_the_longest_row(capacity, settings, fewest):
    found = job(f"planner.capacity={capacity}", *settings)
    assert found.fewest(found.cost(places(*"aaaa")), places(*"aaaa")) == fewest


def test_degrees_are_legal_ones_that_the_config_allows():
    assert job().degrees(4) == (1, 2, 4)  # 4 query heads, 2 key/value heads
    assert job().degrees(3) == (1, 2)
    assert job("planner.degrees=[2,3]").degrees(4) == (2,)
    with pytest.raises(PlanningError, match=r"planner.degrees=\[4\].*\[1, 2\]"):
        job("planner.degrees=[4]").degrees(3)


def test_a_preset_replaces_the_estimate():
    preset = job("planner.preset=gpt-7b-a100-40g").cost(places(*"aaaa"))
    assert preset.quadratic == 5.128e-6


def test_the_estimate_counts_operations():
    shape = estimate.Shape(
        parameters=10**9,
        trained=10**9,
        layers=16,
        hidden=2048,
        intermediate=8192,
        heads=32,
        kv_heads=8,
        head_size=64,
        value_bytes=2,
        state_bytes=16 * 10**9,
        activation_checkpointing=False,
    )
    device = estimate.gpu("NVIDIA H100 80GB HBM3", 80_000)
    cost = estimate.estimate_cost(shape, device, gpus=8, communicators=4)
    # 6 operations per parameter and token; 6 s^2 per layer and attended channel when causal.
    assert cost.linear * device.flops_per_ms == pytest.approx(6e9)
    assert cost.quadratic * device.flops_per_ms == pytest.approx(6 * 16 * 2048)
    # q, k, v and the output, in bfloat16, forward and backward, all layers.
    assert cost.exchange_mb_per_token * 2**20 == 2 * 16 * (2 * 32 + 2 * 8) * 64 * 2
    assert cost.state_mb * 2**20 == 16e9
    assert cost.capacity(8) > cost.capacity(4) > 0
    # Gathers twice and reduces once, over 8 ranks on NVLink.
    assert cost.micro_step_ms == pytest.approx(3 * 2e9 / 2**20 / 100)


def test_the_estimate_knows_ranks_that_share_parameters_and_frozen_parameters():
    shape = job("train.dtype=bfloat16")._shape
    device = estimate.gpu("NVIDIA H100 80GB HBM3", 80_000)

    def costs(shape, sizes, gpus=64):
        return [estimate.estimate_cost(shape, device, gpus, 0, size) for size in sizes]

    every, node, single = costs(shape, (None, 8, 1))
    # Over 64 ranks parameters cross nodes; over the 8 of a node they do not; over one, nothing.
    assert every.micro_step_ms == pytest.approx(5 * node.micro_step_ms)
    assert node.micro_step_ms > single.micro_step_ms == 0
    shares = [(c.usable_mb - c.capacity(64) * c.mb_per_token) for c in (every, node, single)]
    assert shares == pytest.approx([every.state_mb / n for n in (64, 8, 1)], abs=every.mb_per_token)
    # Adapters of a tenth: no gradients of the rest, neither computed, nor summed, nor kept.
    some = replace(shape, trained=shape.parameters // 10)
    frozen, whole = costs(some, (8,)) + costs(shape, (8,))
    assert frozen.linear == pytest.approx(whole.linear * 2.1 / 3, rel=1e-3)
    assert frozen.micro_step_ms == pytest.approx(whole.micro_step_ms * 2.1 / 3, rel=1e-3)


def test_states_are_masters_gradients_moments_and_frozen_parameters_in_the_compute_dtype():
    half = job("train.dtype=bfloat16")
    assert half._shape.state_bytes == 16 * half.parameters
    assert job("train.dtype=float64")._shape.state_bytes == 32 * half.parameters
    some = replace(half, trained=1000)
    assert some._shape.state_bytes == 16 * 1000 + 2 * (half.parameters - 1000)


def test_adapters_are_what_is_trained_and_counted():
    few = job("model.lora={rank: 2, targets: [q_proj]}", "train.dtype=bfloat16")
    assert few.trained == 2 * 2 * (64 + 64)  # two layers, q of 64 x 64
    assert few.parameters == job().parameters + few.trained
    assert few._shape.state_bytes == 16 * few.trained + 2 * job().parameters
    assert job("model.lora={}").settings.lora == Lora(16, 32.0, None)
    with pytest.raises(UserError, match=r"targets: qproj is no linear .* did you mean q_proj\?$"):
        job("model.lora.targets=[qproj]")


def test_a_shard_size_must_divide_the_ranks():
    pairs = job("cluster.shard_size=2", "model.config.num_attention_heads=4")
    assert pairs.settings.shard_size == pairs.cost(places(*"aaaa")).shard_size == 2
    with pytest.raises(UserError, match=r"shard_size=2 does not divide the 3 ranks.*\[1, 3\]"):
        pairs.cost(places(*"aaa"))
    preset = job("cluster.shard_size=2", "planner.preset=gpt-7b-a100-40g").cost(places(*"aa"))
    assert preset.shard_size == 2


def test_settings_that_cannot_work_together_are_found_early():
    with pytest.raises(PlanningError, match=r"planner.degrees=\[3\]"):
        job("planner.degrees=[3]")
    with pytest.raises(UserError, match="gpt-7b"):
        job("planner.preset=gpt-7b")
    with pytest.raises(UserError, match=r"attention=flash needs a GPU.*cpu and float32"):
        job("model.attention=flash").check_device("cpu")
    job("model.attention=flash", "train.dtype=bfloat16").check_device("cuda")
    few = job("planner.communicators_per_rank=1")
    with pytest.raises(UserError, match="less than the 2 degrees above 1"):
        few.check_communicators((1, 2, 4))
    few.check_communicators((1, 2))


def test_data_without_a_label_is_refused(tmp_path):
    (tmp_path / "one.txt").write_text("x")
    annotate([tmp_path / "one.txt"], tmp_path / "corpus", "bytes")
    with pytest.raises(UserError, match="no sequence of up to 3072 tokens has a token to predict"):
        job(f"data.corpus={tmp_path / 'corpus'}")


def test_a_folder_without_weights_is_refused(tmp_path):
    job().model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"no \*\.safetensors file"):
        job(f"model.path={tmp_path}")
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "part.safetensors"}}'
    )
    with pytest.raises(UserError, match=r"part\.safetensors: no such file"):
        job(f"model.path={tmp_path}")


def test_actors_are_told_the_absolute_folder_of_weights(tmp_path, monkeypatch):
    job().model.save_pretrained(tmp_path / "weights")
    (tmp_path / "weights" / "model.safetensors").write_text("")
    monkeypatch.chdir(tmp_path)
    assert job("model.path=weights").settings.weights == tmp_path / "weights"


@pytest.mark.parametrize(
    ("limits", "ranks"),
    [
        ({}, 4),
        ({"min_gpus": 8}, 8),
        ({"max_gpus": 2}, 2),
        ({"min_gpus": 2, "max_gpus": 8}, 4),
        ({"gpus": 3, "max_gpus": 8}, 3),
    ],
)
def test_a_given_limit_bounds_the_default_number_of_ranks(limits, ranks):
    assert ranks_of(ClusterSection(**limits), 4) == ranks
