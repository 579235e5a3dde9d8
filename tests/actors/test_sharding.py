"""Parameters: the same values whatever the world, from a seed or from Hugging Face files."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from flexray.actors.model import ModelRefused, build_on_meta
from flexray.actors.sharding import random_parameters, saved_parameters, weight_files
from tests.actors.models import config, engine
from tests.worlds import run_world


def values(rank, world, store, models):
    """Whole parameters and buffers of engines of these (config, settings), and local row counts."""
    found = []
    for number, (hf_config, settings) in enumerate(models):
        own = dist.PrefixStore(str(number), store)
        ours = engine(rank, world, own, [], hf_config, **settings)
        model = ours.model.model
        rows = {n: p.to_local().shape[0] for n, p in model.named_parameters()}
        whole = {n: p.full_tensor().detach().numpy() for n, p in model.named_parameters()}
        whole |= {n: b.numpy() for n, b in model.named_buffers()}
        found.append((whole, rows))
        ours.leave()
    return found


def same(a, b):
    return a.keys() == b.keys() and all((a[name] == b[name]).all() for name in a)


MODELS = [
    (config(), {"seed": 0}),
    (config(), {"seed": 1}),
    (config("qwen2", tie_word_embeddings=True), {"seed": 0}),
    (config("gemma", head_dim=8), {"seed": 0}),
]


@pytest.fixture(scope="module")
def worlds():
    return {world: run_world(world, values, MODELS) for world in (1, 3, 4)}


def test_random_parameters_do_not_depend_on_the_world(worlds):
    for world, ranks in worlds.items():
        for rank in ranks:
            for (whole, _), (alone, _) in zip(rank, worlds[1][0], strict=True):
                assert same(whole, alone), world


def test_a_seed_decides_the_values(worlds):
    first, second = worlds[1][0][0][0], worlds[1][0][1][0]
    assert first.keys() == second.keys()
    for name, value in first.items():
        if "norm" not in name and "rotary" not in name:
            assert (value != second[name]).mean() > 0.9, name


def test_equal_shapes_get_other_values(worlds):
    whole = worlds[1][0][0][0]
    a, b = (whole[f"model.layers.{i}.self_attn.q_proj.weight"] for i in (0, 1))
    assert (a != b).mean() > 0.9


def test_random_values_have_the_spread_that_the_model_asks_for(worlds):
    whole = worlds[1][0][0][0]
    assert 0.095 < whole["lm_head.weight"].std() < 0.105  # initializer_range 0.1
    assert (whole["model.norm.weight"] == 1).all()


def test_every_rank_holds_its_own_rows_only(worlds):
    for world, ranks in worlds.items():
        for model in range(len(MODELS)):
            whole, rows = ranks[0][model]
            for name in rows:
                held = [rank[model][1][name] for rank in ranks]
                total = whole[name].shape[0]
                assert sum(held) == total
                assert max(held) == -(-total // world)


def test_buffers_are_what_a_plain_build_has(worlds):
    for (hf_config, _), (whole, _) in zip(MODELS, worlds[3][2], strict=True):
        plain = AutoModelForCausalLM.from_config(hf_config)
        buffers = dict(plain.named_buffers())
        assert buffers
        for name, buffer in buffers.items():
            assert (whole[name] == buffer.numpy()).all(), name


def test_random_parameters_leave_the_blueprint_as_it_was():
    blueprint = build_on_meta(config("gemma", head_dim=8), torch.float32)
    names = [name for name, _ in random_parameters(blueprint, 0)]
    assert names == [name for name, _ in blueprint.named_parameters()]
    assert {t.device.type for t in (*blueprint.parameters(), *blueprint.buffers())} == {"meta"}


def test_files_of_save_pretrained_load_bit_equal(tmp_path):
    models = []
    for tied in (False, True):
        hf_config = config("qwen2", tie_word_embeddings=tied)
        torch.manual_seed(7)
        AutoModelForCausalLM.from_config(hf_config).save_pretrained(
            tmp_path / str(tied), max_shard_size="50KB"
        )
        assert len(list((tmp_path / str(tied)).glob("*.safetensors"))) > 1
        models.append((hf_config, {"weights": tmp_path / str(tied)}))
    for world in (1, 3):
        ranks = run_world(world, values, models)
        for (hf_config, settings), *found in zip(models, *ranks, strict=True):
            saved = AutoModelForCausalLM.from_pretrained(settings["weights"])
            for whole, _ in found:
                for name, parameter in saved.named_parameters():
                    assert (whole[name] == parameter.detach().numpy()).all(), (world, name)
                assert ("lm_head.weight" in whole) != hf_config.tie_word_embeddings


def test_bfloat16_files_fill_float32_masters(tmp_path):
    hf_config = config()
    AutoModelForCausalLM.from_config(hf_config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    whole, _ = run_world(1, values, [(hf_config, {"weights": tmp_path})])[0][0]
    saved = load_file(tmp_path / "model.safetensors")
    for name, tensor in saved.items():
        assert whole[name].dtype == "float32"
        assert (whole[name] == tensor.float().numpy()).all()


def refusal(rank, world, store, hf_config, folders):
    said = []
    for number, folder in enumerate(folders):
        own = dist.PrefixStore(str(number), store)
        try:
            engine(rank, world, own, [], hf_config, weights=folder)
        except ModelRefused as error:
            said.append(str(error))
        assert not dist.is_initialized()  # an engine that was not built has left its world
    return said


def test_files_that_do_not_fit_are_refused_by_name(tmp_path):
    hf_config = config()
    AutoModelForCausalLM.from_config(hf_config).save_pretrained(tmp_path / "right")
    right = load_file(tmp_path / "right" / "model.safetensors")
    norm, head = right["model.norm.weight"], right["lm_head.weight"]
    wrong = {
        "shape": right | {"lm_head.weight": head[:, :10].contiguous()},
        "missing": {k: v for k, v in right.items() if k != "model.norm.weight"},
        "unknown": right | {"model.extra.weight": norm.clone()},
        "nothing": None,
    }
    for name, tensors in wrong.items():
        (tmp_path / name).mkdir()
        if tensors is not None:
            save_file(tensors, tmp_path / name / "model.safetensors")
    said = run_world(2, refusal, hf_config, [tmp_path / name for name in wrong])
    assert said[0] == said[1]
    shape, missing, unknown, nothing = said[0]
    assert "lm_head.weight has shape (211, 10), the model (211, 64)" in shape
    assert "model.norm.weight is missing" in missing
    assert "no parameter model.extra.weight" in unknown
    assert str(tmp_path / "nothing") in nothing
    assert all("\n" not in line for line in said[0])


def test_values_that_no_initialiser_sets_are_refused_not_left_as_garbage():
    blueprint = build_on_meta(config("apertus", head_dim=8), torch.float32)
    with pytest.raises(ModelRefused, match=r"act_fn\.alpha_p"):
        list(random_parameters(blueprint, 0))


def test_a_file_may_hold_the_head_of_a_tied_model(tmp_path):
    hf_config = config("qwen2", tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_config(hf_config)
    tensors = {k: v.clone() for k, v in model.state_dict().items()}
    assert "lm_head.weight" in tensors
    save_file(tensors, tmp_path / "model.safetensors")
    names = [n for n, _ in saved_parameters(build_on_meta(hf_config, torch.float32), tmp_path)]
    assert sorted(names) == sorted(n for n, _ in model.named_parameters())


def stray(hf_config):
    """A file that `saved_parameters` would refuse."""
    return {"model.extra.weight": torch.zeros(hf_config.hidden_size)}


@pytest.mark.parametrize("file_size", ["50KB", "5GB"])
def test_only_the_files_of_the_model_are_read(tmp_path, file_size):
    hf_config = config()
    model = AutoModelForCausalLM.from_config(hf_config)
    model.save_pretrained(tmp_path, max_shard_size=file_size)
    assert (tmp_path / "model.safetensors").exists() == (file_size == "5GB")
    for name in ("adapter_model", "consolidated"):
        save_file(stray(hf_config), tmp_path / f"{name}.safetensors")
    names = [n for n, _ in saved_parameters(build_on_meta(hf_config, torch.float32), tmp_path)]
    assert sorted(names) == sorted(n for n, _ in model.named_parameters())


def test_without_the_usual_names_all_files_are_read(tmp_path):
    save_file(stray(config()), tmp_path / "weights.safetensors")
    assert weight_files(tmp_path) == [tmp_path / "weights.safetensors"]


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ('{"weight_map": {"a": "model-1.safetensors"}}', "model-1.safetensors: no such file, and"),
        ('{"weight_map": {"a": ', "not an index of weights"),
        ('{"weights": 1}', "not an index of weights"),
        ('{"weight_map": {"a": 1}}', "not an index of weights"),
    ],
)
def test_an_index_that_is_wrong_is_one_line(tmp_path, index, words):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelRefused, match=words) as error:
        weight_files(tmp_path)
    assert "\n" not in str(error.value)


def test_a_file_that_is_cut_short_is_one_line(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"\x10\0\0")
    with pytest.raises(ModelRefused, match=r"model\.safetensors: cannot read: .*[Hh]eader"):
        list(saved_parameters(build_on_meta(config(), torch.float32), tmp_path))
