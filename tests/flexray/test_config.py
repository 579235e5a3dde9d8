import json
import re
from pathlib import Path

import pytest

from flexray.config import DEFAULT_MODEL, Config, load_config
from flexray.errors import UserError


@pytest.fixture
def read(tmp_path, monkeypatch):
    """Read a config text and overrides as `flexray train config.yaml --set ...` does."""
    monkeypatch.chdir(tmp_path)

    def read(text=None, *overrides):
        if text is None:
            return load_config(None, list(overrides))
        Path("config.yaml").write_text(text)
        return load_config(Path("config.yaml"), list(overrides))

    return read


def test_no_file_gives_the_defaults(read):
    config = read()
    assert config == Config()
    assert config.model.config == DEFAULT_MODEL
    assert config.train.steps == 30


def test_file_and_overrides_are_merged_key_by_key(read):
    config = read("train: {steps: 7, seed: 3}\ndata:\n", "train.steps=9", "data.max_length=64")
    assert (config.train.steps, config.train.seed, config.data.max_length) == (9, 3, 64)


def test_the_last_override_of_a_key_wins(read):
    assert read(None, "train.steps=1", "train.steps=2").train.steps == 2


@pytest.mark.parametrize(
    ("override", "section", "value"),
    [
        ("train.learning_rate=1e-3", "train", {"learning_rate": 0.001}),
        ("train.learning_rate=1", "train", {"learning_rate": 1.0}),
        ("train.betas=[0.9, 0.99]", "train", {"betas": (0.9, 0.99)}),
        ("planner.degrees=[1, 2]", "planner", {"degrees": (1, 2)}),
        ("run.dir=out/here", "run", {"dir": Path("out/here")}),
        ("run.dir=~/here", "run", {"dir": Path.home() / "here"}),
        ("run.name=007", "run", {"name": "007"}),
        ("run.name=1e3", "run", {"name": "1e3"}),
        ("run.name=true", "run", {"name": "true"}),
        ("data.corpus=a=b", "data", {"corpus": "a=b"}),
    ],
)
def test_override_values(read, override, section, value):
    got = getattr(read(None, override), section)
    assert {key: getattr(got, key) for key in value} == value


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        (None, [], DEFAULT_MODEL),
        (None, ["model.config.hidden_size=256"], DEFAULT_MODEL | {"hidden_size": 256}),
        (None, ["model.config.model_type=qwen3"], DEFAULT_MODEL | {"model_type": "qwen3"}),
        (
            None,
            ["model.config.rope_scaling.factor=2.0"],
            DEFAULT_MODEL | {"rope_scaling": {"factor": 2.0}},
        ),
        (
            "model: {config: {hidden_size: 64}}",
            ["model.config.vocab_size=300"],
            DEFAULT_MODEL | {"hidden_size": 64, "vocab_size": 300},
        ),
        # A full config stays as Hugging Face reads it: absent keys are its defaults, not ours.
        (
            "model: {config: {model_type: qwen2}}",
            ["model.config.hidden_size=64"],
            {"model_type": "qwen2", "hidden_size": 64},
        ),
        ("model: {path: weights}", [], None),
        (None, ["model.path=weights"], None),
    ],
)
def test_model_config(read, text, overrides, expected):
    assert read(text, *overrides).model.config == expected


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        (None, []),
        (None, ["run.name=1e3", "train.learning_rate=1e-05", "planner.degrees=[4,1]"]),
        (None, ["model.path=weights", "train.clip_norm=5", "cluster.gpus=3"]),
        ("run: {name: 'off'}\nmodel: {config: {model_type: x, a: ['1e3', 012, {b: ~}]}}", []),
    ],
)
def test_resolved_config_reads_back_equal(read, text, overrides):
    config = read(text, *overrides)
    assert read(config.to_yaml()) == config
    assert read(json.dumps(config.to_dict())) == config


def test_named(read):
    config = read(None, "train.steps=3").named("abc")
    assert (config.run.name, config.train.steps) == ("abc", 3)


FILE_ERRORS = [
    ("train: {step: 5}", "config.yaml: unknown key train.step: did you mean train.steps?"),
    ("trian: {steps: 5}", "config.yaml: unknown key trian: did you mean train?"),
    ("steps: 5", "config.yaml: unknown key steps: did you mean train.steps?"),
    ("train: {gpus: 5}", "config.yaml: unknown key train.gpus: did you mean cluster.gpus?"),
    (
        "tracking: {colour: red}",
        "config.yaml: unknown key tracking.colour: allowed here: wandb, project",
    ),
    ("train: 5", "config.yaml: train: must be a mapping of keys, not 5"),
    ("train: [1]", "config.yaml: train: must be a mapping of keys, not a list"),
    ("- train", "config.yaml: must hold sections such as 'train:', not a list"),
    ("just words", "config.yaml: must hold sections such as 'train:', not 'just words'"),
    ("train: {steps: 5, steps: 6}", "key steps is there twice (line 1, column 19)"),
    ("train: {steps: 5", "config.yaml: not valid YAML: "),
    ("a: &x [*x]", "config.yaml: an alias (*) refers to what holds it"),
    ("train: {steps: true}", "config.yaml: train.steps: must be an integer, not true"),
    ("train: {steps: '5'}", "config.yaml: train.steps: must be an integer, not '5'"),
    ("train: {steps: 5.5}", "config.yaml: train.steps: must be an integer, not 5.5"),
    ("train: {steps: ~}", "config.yaml: train.steps: must be an integer, not null"),
    ("train: {steps: -1}", "config.yaml: train.steps: must be greater than 0, not -1"),
    ("train: {batch_sequences: 0}", "train.batch_sequences: must be greater than 0, not 0"),
    ("data: {max_length: 0}", "data.max_length: must be greater than 0, not 0"),
    ("train: {learning_rate: .nan}", "train.learning_rate: must be a finite number, not nan"),
    ("train: {learning_rate: .inf}", "train.learning_rate: must be a finite number, not inf"),
    ("train: {learning_rate: true}", "train.learning_rate: must be a number, not true"),
    ("train: {dtype: fp16}", "must be 'float32', 'bfloat16' or 'float64', not 'fp16'"),
    ("train: {betas: [0.9]}", "train.betas.1: is missing"),
    ("train: {betas: [0.9, 0.9, 0.9]}", "train.betas: has 3 items, takes 2"),
    ("train: {betas: [0.9, 1.0]}", "train.betas.1: must be less than 1, not 1.0"),
    ("planner: {degrees: []}", "planner.degrees: has 0 items, needs 1"),
    ("planner: {degrees: [2, 0]}", "planner.degrees.1: must be greater than 0, not 0"),
    ("planner: {degrees: 2}", "planner.degrees: must be a list, not 2"),
    ("run: {name: ../up}", "run.name: must be letters, digits, '.', '_' and '-'"),
    ("run: {name: .hidden}", "run.name: must be letters, digits"),
    ("run: {name: 7}", "run.name: must be text, in quotes, not 7"),
    ("model: {config: 5}", "model.config: must be a mapping of keys, not 5"),
    ("model: {config: {model_type: 5}}", "model.config.model_type must be text"),
    ("model: {config: {a: {b: [.nan]}}}", "model.config must not hold .nan or .inf"),
    ("model: {config: {a: 1}, path: x}", "model.config and model.path exclude each other"),
    (
        "train: {validate_every: 5}",
        "config.yaml: train.validate_every needs held-out rows: give da",
    ),
    ("cluster: {gpus: 3, max_gpus: 2}", "cluster.gpus (3) must not be greater than cluster.max_g"),
    ("cluster: {min_gpus: 4, max_gpus: 2}", "cluster.min_gpus (4) must not be greater than clus"),
    ("cluster: {min_gpus: 4, gpus: 2}", "cluster.min_gpus (4) must not be greater than cluster.g"),
    ("cluster: {shard_size: 0}", "cluster.shard_size: must be greater than 0, not 0"),
    ("model: {lora: {rank: 0}}", "model.lora.rank: must be greater than 0, not 0"),
    ("model: {lora: {targets: q_proj}}", "model.lora.targets: must be a list, not 'q_proj'"),
    ("model: {lora: {dropout: 0.1}}", "unknown key model.lora.dropout: allowed here: rank, alpha"),
    ("train: {schedule: step}", "train.schedule: must be 'constant', 'linear' or 'cosine'"),
    (
        "train: {min_learning_rate: 0.1}",
        "train.min_learning_rate (0.1) must not be greater than train.learning_rate (0.005)",
    ),
    (f"data: {{corpus: [{'x' * 999}]}}", "config.yaml: data.corpus: must be text, not a list"),
    ("data: {corpus: x, mixture: [{corpus: a, weight: 1}]}", "data.corpus and data.mixture exclud"),
    ("data: {mixture: []}", "data.corpus and data.mixture: give one of them"),
    ("data: {mixture: x}", "config.yaml: data.mixture: must be a list, not 'x'"),
    ("data: {mixture: [x]}", "config.yaml: data.mixture.0: must be a mapping of keys, not 'x'"),
    ("data: {mixture: [{corpus: a}]}", "config.yaml: data.mixture.0.weight: is missing"),
    (
        "data: {mixture: [{corpus: a, weight: 0}]}",
        "config.yaml: data.mixture.0.weight: must be greater than 0, not 0",
    ),
    (
        "data: {mixture: [{corpus: a, weight: 1, wieght: 1}]}",
        "config.yaml: unknown key data.mixture.0.wieght: did you mean data.mixture.0.weight?",
    ),
    ("data: {validation: 0}", "data.validation: must be a corpus or a number of sequences above"),
    ("data: {validation: true}", "a number of sequences above 0, not true"),
    ("data: {max_length: 2147483648}", "data.max_length: must be less than 2147483648, not 21474"),
    ("train: {batch_tokens: 0}", "config.yaml: train.batch_tokens: must be greater than 0, not 0"),
    (
        "train: {batch_tokens: 5, batch_sequences: 5}",
        "train.batch_sequences and train.batch_tokens exclude each other: give one of them, and",
    ),
    ("train: {batch_sequences: ~}", "train.batch_sequences and train.batch_tokens: give one of"),
]


@pytest.mark.parametrize(("text", "message"), FILE_ERRORS)
def test_errors_in_a_file(read, text, message):
    with pytest.raises(UserError) as caught:
        read(text)
    line = str(caught.value)
    assert message in line
    assert line.startswith("config.yaml: ")
    assert "\n" not in line


def test_a_wrong_key_that_others_follow_from_is_one_error(read):
    with pytest.raises(UserError) as caught:
        read("data: {mixture: 5}")
    assert str(caught.value) == "config.yaml: data.mixture: must be a list, not 5"


def test_keys_that_exclude_each_other(read):
    mixture = "data.mixture=[{corpus: a, weight: 0.7}, {corpus: b, weight: 1}]"
    config = read(None, mixture, "train.batch_tokens=4096")
    assert [(s.corpus, s.weight) for s in config.data.shares] == [("a", 0.7), ("b", 1.0)]
    assert (config.data.corpus, config.train.batch_sequences) == (None, None)
    assert read(config.to_yaml()) == config
    changed = read(config.to_yaml(), "data.mixture=null", "data.corpus=c")
    assert [(s.corpus, s.weight) for s in changed.data.shares] == [("c", 1.0)]
    assert [s.corpus for s in read().data.shares] == ["builtin"]
    assert read(None, "data.validation=100").data.validation == 100
    assert read(None, "data.validation=a").data.validation == "a"


OVERRIDE_ERRORS = [
    ("train.steps", "--set train.steps: must read section.key=value, such as train.steps=100"),
    ("steps=5", "--set steps=5: must read section.key=value"),
    ("=5", "--set =5: must read section.key=value"),
    ("train..steps=5", "--set train..steps=5: must read section.key=value"),
    ("train.step=5", "--set train.step=5: unknown key train.step: did you mean train.steps?"),
    ("train.steps=", "--set train.steps=: train.steps: must be an integer, not null"),
    ("train.steps=[1", "--set train.steps=[1: the value is not valid YAML"),
    ("train.steps.x=5", "--set train.steps.x=5: train.steps: must be an integer, not a mapping"),
    ("train.steps=a\nb", "--set train.steps=a b: train.steps: must be an integer, not 'a b'"),
    ("model.config.hidden_size.x=2", "model.config.hidden_size is 64, not a mapping of keys"),
]


@pytest.mark.parametrize(("override", "message"), OVERRIDE_ERRORS)
def test_errors_in_an_override(read, override, message):
    with pytest.raises(UserError) as caught:
        read("train: {seed: 1}", override)
    line = str(caught.value)
    assert line.startswith(message) or (line.startswith("--set ") and message in line)
    assert "\n" not in line


def test_each_error_names_where_it_came_from(read):
    with pytest.raises(UserError) as caught:
        read("train: {steps: 0, sed: 1}", "data.max_length=-1", "run.name=a/b")
    line = str(caught.value)
    assert "config.yaml: train.steps: must be greater than 0" in line
    assert "config.yaml: unknown key train.sed: did you mean train.seed?" in line
    assert "--set data.max_length=-1: data.max_length: must be greater than 0" in line
    assert "--set run.name=a/b: run.name: must be letters" in line


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match=r"nope\.yaml: cannot read this config: No such file"):
        load_config(tmp_path / "nope.yaml", [])
    with pytest.raises(UserError, match="cannot read this config: Is a directory"):
        load_config(tmp_path, [])
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(UserError, match="binary: not valid YAML"):
        load_config(tmp_path / "binary", [])


def test_a_config_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        Config().train.steps = 3


def documented():
    """Key -> default, from the tables of docs/config.md."""
    text = (Path(__file__).parents[2] / "docs" / "config.md").read_text()
    keys = {}
    for section in text.split("\n## ")[1:]:
        name = section.split("\n")[0]
        for key, default in re.findall(r"^\| `(\w+)` \| (.+?) \|", section, re.MULTILINE):
            keys[f"{name}.{key}"] = default
    return keys


def test_the_document_names_every_key_with_its_default():
    config = Config().to_dict()
    expected = {
        f"{section}.{key}": f"`{str(value) if isinstance(value, float) else json.dumps(value)}`"
        for section, keys in config.items()
        for key, value in keys.items()
    }
    expected = {key: value.replace('"', "") for key, value in expected.items()}
    assert documented() == expected | {"model.config": "a small Llama"}
