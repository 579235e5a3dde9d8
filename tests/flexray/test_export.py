"""A checkpoint of several ranks becomes a folder that transformers loads, with equal logits."""

from __future__ import annotations

import dataclasses
import json
import re
import resource
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer

from flexray.actors.checkpoint import Checkpointer
from flexray.actors.lora import Lora
from flexray.checkpoints import CheckpointFolder
from flexray.config import load_config
from flexray.datasets.annotate import annotate
from flexray.errors import UserError
from flexray.export import export
from flexray.resume import locate
from tests.actors.models import (
    VOCAB,
    config,
    engine,
    label_tokens,
    reference_model,
    sequences,
    work_of,
)
from tests.flexray.test_checkpoints import state
from tests.worlds import run_world

BATCH = sequences([40, 9, 23, 5])
MODELS = {
    "tied": config("qwen3", tie_word_embeddings=True),
    "untied": config("llama"),
    "buffers": config("gemma", head_dim=8),
}


def save(rank, world, store, location, hf_config, settings=None):
    """Trains two steps and saves; the whole parameters by their Hugging Face names."""
    from flexray.solver.communicators import CommunicatorCache

    ours = engine(rank, world, store, BATCH, hf_config, learning_rate=0.01, **(settings or {}))
    groups = [((r,), tuple(range(len(BATCH)))[r::world]) for r in range(world)]
    communicators = CommunicatorCache(4)
    for step in (1, 2):
        total = label_tokens(BATCH)
        ours.run_step(work_of(rank, [groups], total, communicators, step=step))
    Checkpointer(ours.model.model, ours.optimizer).save(location)()
    named = ours.model.model.named_parameters()
    return {name: p.detach().full_tensor().numpy() for name, p in named}


def checkpoint_of(folder, hf_config, settings=None, **sections):
    """A whole checkpoint by two ranks, and the parameters that are in it."""
    checkpoints = CheckpointFolder(str(folder / "checkpoints"))
    parameters = run_world(2, save, checkpoints.begin(2), hf_config, settings)[0]
    saved = state(
        2,
        config=load_config(sections, []).to_dict(),
        model=json.loads(hf_config.to_json_string()),
    )
    return checkpoints.publish(saved), parameters


@pytest.fixture(scope="module", params=MODELS)
def saved(request, tmp_path_factory):
    hf_config = MODELS[request.param]
    return hf_config, *checkpoint_of(tmp_path_factory.mktemp(request.param), hf_config)


def logits(model):
    ids = torch.from_numpy(BATCH[0][0])[None]
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def test_transformers_loads_it_with_equal_parameters_and_logits(saved, tmp_path, monkeypatch):
    hf_config, checkpoint, parameters = saved
    reference = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            parameter.copy_(torch.from_numpy(parameters[name]))

    for name, file_bytes in {"one": 2**30, "many": 60_000}.items():
        monkeypatch.setattr("flexray.safetensors_files.FILE_BYTES", file_bytes)
        read = []
        exported = export(checkpoint, tmp_path / name, progress=read.append)
        files = sorted(path.name for path in (tmp_path / name).glob("*.safetensors"))
        assert (len(files) == 1) == (name == "one")
        assert sorted(read) == sorted(parameters)  # tied ones once
        assert exported.values == sum(value.size for value in parameters.values())
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert model.dtype == torch.float32 and type(model) is type(reference)
        for key, value in model.named_parameters():
            assert (value.detach().numpy() == parameters[key]).all(), key
        assert torch.equal(logits(model.eval()), logits(reference.eval()))


def test_parameters_may_be_written_in_another_dtype(saved, tmp_path):
    _, checkpoint, parameters = saved
    export(checkpoint, tmp_path / "out", dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    for key, value in model.named_parameters():
        assert torch.equal(value, torch.from_numpy(parameters[key]).bfloat16()), key


def test_a_folder_that_holds_something_is_left_alone(saved, tmp_path):
    _, checkpoint, _ = saved
    (tmp_path / "mine").write_text("")
    with pytest.raises(UserError, match="is there already: choose another folder"):
        export(checkpoint, tmp_path)
    gone = dataclasses.replace(checkpoint, location=str(tmp_path / "gone"))
    with pytest.raises(UserError, match="gone: no checkpoint"):
        export(gone, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_nothing_beside_the_folder_is_touched(saved, tmp_path):
    (tmp_path / "out.unfinished").mkdir()
    (tmp_path / "out.unfinished" / "mine").write_text("")
    export(saved[1], tmp_path / "out")
    assert sorted(path.name for path in tmp_path.rglob("*") if path.parent != tmp_path / "out") == [
        "mine",
        "out",
        "out.unfinished",
    ]


def test_a_disk_that_is_full_is_one_line(saved, tmp_path):
    out = tmp_path / "out"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in (1000, 0):  # within a file of weights; at once
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
            with pytest.raises(UserError, match=rf"^{re.escape(str(out))}: cannot write: .*large"):
                export(saved[1], out)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


def of_type(checkpoint, model_type, **config):
    """The checkpoint as a run of a model of another type would have saved it."""
    changed = checkpoint.state.model | {"model_type": model_type}
    saved_config = checkpoint.state.config | config
    return dataclasses.replace(
        checkpoint, state=dataclasses.replace(checkpoint.state, model=changed, config=saved_config)
    )


def test_a_model_of_ones_own_is_written_for_its_own_class(saved, tmp_path):
    hf_config, checkpoint, parameters = saved
    export(of_type(checkpoint, "my_own"), tmp_path / "out")
    assert "architectures" not in json.loads((tmp_path / "out" / "config.json").read_text())
    own = type(AutoModelForCausalLM.from_config(hf_config))
    model = own.from_pretrained(tmp_path / "out", config=hf_config)
    for key, value in model.named_parameters():
        assert (value.detach().numpy() == parameters[key]).all(), key


def test_adapters_of_a_model_of_ones_own_cannot_be_merged(adapted, tmp_path):
    with pytest.raises(UserError, match=r"--merge: transformers has no causal .* of type my_own"):
        export(of_type(adapted[0], "my_own"), tmp_path / "out", merge=True)
    assert not list(tmp_path.iterdir())


def test_the_tokenizer_comes_along_where_it_is_known(tmp_path):
    words = {f"w{i}": i for i in range(VOCAB)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("w1 w2 w3")
    annotate([tmp_path / "text.txt"], tmp_path / "corpus", str(tmp_path / "tokenizer.json"))
    data = {"corpus": str(tmp_path / "corpus")}
    checkpoint, _ = checkpoint_of(tmp_path, MODELS["untied"], data=data)

    exported = export(checkpoint, tmp_path / "known")
    assert exported.tokenizer == str(tmp_path / "tokenizer.json")
    assert AutoTokenizer.from_pretrained(tmp_path / "known").vocab_size == VOCAB

    words["other"] = words.pop("w7")  # not what the corpus was made with any more
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(tmp_path / "tokenizer.json"))
    assert export(checkpoint, tmp_path / "unknown").tokenizer is None
    assert not (tmp_path / "unknown" / "tokenizer.json").exists()


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """A checkpoint of adapters on a folder of weights, and the adapted model by PEFT itself."""
    folder = tmp_path_factory.mktemp("adapted")
    base = reference_model(MODELS["tied"], torch.float32)
    base.save_pretrained(folder / "base")
    lora = Lora(rank=3, alpha=12.0, targets=("q_proj", "down_proj"))
    settings = {"lora": lora, "weights": folder / "base"}
    sections = {"model": {"path": folder / "base", "lora": dataclasses.asdict(lora)}}
    checkpoint, parameters = checkpoint_of(folder, MODELS["tied"], settings, **sections)
    targets = list(lora.targets)
    right = get_peft_model(base, LoraConfig(r=3, lora_alpha=12.0, target_modules=targets))
    with torch.no_grad():
        for name, parameter in right.named_parameters():
            if parameter.requires_grad:
                value = parameters[name.removeprefix("base_model.model.")]
                parameter.copy_(torch.from_numpy(value))
                assert value.any()
    return checkpoint, right.eval()


def test_adapters_become_a_folder_that_peft_loads(adapted, tmp_path):
    checkpoint, right = adapted
    export(checkpoint, tmp_path / "adapters")
    assert not list((tmp_path / "adapters").glob("model*"))
    model = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapters").eval()
    assert torch.equal(logits(model), logits(right))


def test_merged_adapters_need_no_peft(adapted, tmp_path):
    checkpoint, right = adapted
    export(checkpoint, tmp_path / "merged", merge=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert not any("lora" in name for name, _ in model.named_parameters())
    assert (logits(model) - logits(right)).abs().max() < 1e-5 * logits(right).abs().max()


def test_adapters_of_random_weights_can_only_be_merged(adapted, saved, tmp_path):
    checkpoint, _ = adapted
    sections = load_config({"model": {"config": {}, "lora": {"rank": 3}}}, []).to_dict()
    of_random = dataclasses.replace(checkpoint.state, config=sections)
    with pytest.raises(UserError, match="write the whole model with --merge"):
        export(dataclasses.replace(checkpoint, state=of_random), tmp_path / "out")
    with pytest.raises(UserError, match="--merge: this run trained no adapters"):
        export(saved[1], tmp_path / "out", merge=True)


def test_export_finds_a_run_as_resume_does(saved, tmp_path):
    _, checkpoint, _ = saved
    assert locate(str(Path(checkpoint.location).parent), tmp_path) == checkpoint
