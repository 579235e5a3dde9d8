"""What a run is told: a YAML file of sections, checked key by key (docs/config.md).

Usage:
    config = load_config(Path("config.yaml"), ["train.steps=100", "model.config.hidden_size=256"])
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from flexray import yaml_text
from flexray.config_errors import describe
from flexray.config_overrides import Override, apply, parse
from flexray.errors import UserError

Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, Field(min_length=1)]
Folder = Annotated[Path, AfterValidator(lambda path: Path(os.path.expanduser(path)))]  # noqa: PTH111

# About two seconds a step on two CPU cores; byte tokens; legal degrees 1, 2 and 4.
DEFAULT_MODEL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


def _check_one_of(section: str, **values: Any) -> None:
    names = " and ".join(f"{section}.{key}" for key in values)
    given = sum(value is not None for value in values.values())
    if given > 1:
        raise ValueError(f"{names} exclude each other: give one of them, and null for the other")
    if not given:
        raise ValueError(f"{names}: give one of them")


def _corpus_or_count(value: Any) -> Any:
    if value is None or (isinstance(value, str) and value) or (type(value) is int and value > 0):
        return value
    raise ValueError(
        "data.validation: must be a corpus or a number of sequences above 0, "
        f"not {yaml_text.kind(value)}"
    )


class Section(BaseModel):
    """Frozen, no unknown keys, no silent conversions (`true` is no number, `"1"` neither)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class RunSection(Section):
    """Where the run is kept."""

    name: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$",
        description="default: a time stamp",
    )
    dir: Folder = Field(default=Path("runs"), description="folder in which each run gets its own")


class ClusterSection(Section):
    """How many GPUs the run takes, and the limits it may be scaled between."""

    address: Text | None = Field(
        default=None, description="Ray address; default: RAY_ADDRESS or local"
    )
    gpus: Positive | None = Field(
        default=None, description="ranks; default: all GPUs, or 4 on CPUs"
    )
    min_gpus: Positive | None = Field(
        default=None, description="fewest to go on with; default: what the longest sequence needs"
    )
    max_gpus: Positive | None = Field(
        default=None, description="most it may be scaled to; default: no limit"
    )
    wait_s: float = Field(
        default=1800.0, gt=0, description="to wait for GPUs when there are too few, then it ends"
    )
    silence_s: float = Field(
        default=60.0, gt=0, description="after which a rank that does not answer is given up"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="auto: cuda where there is"
    )
    shard_size: Positive | None = Field(
        default=None, description="ranks that share one copy of the model; default: all"
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        limits = ("min_gpus", "gpus", "max_gpus")
        given = [(f"cluster.{k}", v) for k in limits if (v := getattr(self, k)) is not None]
        for (low, few), (high, many) in pairwise(given):
            if few > many:
                raise ValueError(f"{low} ({few}) must not be greater than {high} ({many})")
        return self


class LoraSection(Section):
    """Low-rank adapters, trained instead of the weights."""

    rank: Positive = Field(default=16, description="of each adapter")
    alpha: float = Field(default=32.0, gt=0, description="adapters are scaled by alpha / rank")
    targets: Annotated[tuple[Text, ...], Field(strict=False, min_length=1)] | None = Field(
        default=None, description="linear layers by name; default: all of the decoder"
    )


class ModelSection(Section):
    """A causal language model of Hugging Face transformers: random weights or a local folder."""

    config: dict[str, Any] | None = Field(
        default=None,
        description="keys of a Hugging Face config; without model_type: changes to the small Llama",
    )
    path: Folder | None = Field(
        default=None, description="local Hugging Face folder, instead of config"
    )
    lora: LoraSection | None = Field(default=None, description="train adapters only; needs PEFT")
    activation_checkpointing: bool = Field(
        default=False, description="recompute layers in the backward"
    )
    attention: Literal["auto", "flash", "varlen", "sdpa"] = Field(
        default="auto",
        description="backend; auto: the first one that `flexray doctor` calls usable",
    )
    loss_chunk: Positive = Field(default=1024, description="tokens whose logits are held at a time")

    @model_validator(mode="before")
    @classmethod
    def _one_source(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        config, path = data.get("config"), data.get("path")
        if config is not None and path is not None:
            raise ValueError("model.config and model.path exclude each other: give one of them")
        if path is None and (config is None or isinstance(config, dict)):
            config = config or {}
            data = data | {"config": config if "model_type" in config else DEFAULT_MODEL | config}
        return data

    @field_validator("config")
    @classmethod
    def _plain(cls, config: dict[str, Any] | None) -> dict[str, Any] | None:
        if config is not None and not isinstance(config["model_type"], str):
            raise ValueError("model.config.model_type must be text, such as llama")
        try:
            json.dumps(config, allow_nan=False)
        except ValueError:
            raise ValueError("model.config must not hold .nan or .inf") from None
        return config


class CorpusShare(Section):
    """One corpus of a mixture."""

    corpus: Text = Field(description="'builtin' or a folder made by `flexray annotate`")
    weight: float = Field(gt=0, description="share of the sequences, against the others")


class DataSection(Section):
    """What is read."""

    mixture: tuple[CorpusShare, ...] | None = Field(
        default=None, description="several corpora with weights, instead of corpus"
    )
    corpus: Text | None = Field(
        default_factory=lambda data: "builtin" if data.get("mixture") is None else None,
        description="'builtin' or a folder made by `flexray annotate`",
    )
    max_length: Positive = Field(
        default=3072, lt=2**31, description="tokens of the longest sequence admitted"
    )
    over_length: Literal["error", "drop", "truncate", "split"] = Field(
        default="split", description="what happens to longer ones"
    )
    validation: Annotated[str | int | None, BeforeValidator(_corpus_or_count)] = Field(
        default=None,
        description="a corpus, or how many sequences of the others are held out",
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        _check_one_of("data", corpus=self.corpus, mixture=self.mixture or None)
        return self

    @property
    def shares(self) -> tuple[CorpusShare, ...]:
        """The corpora that are trained on."""
        return self.mixture or (CorpusShare(corpus=str(self.corpus), weight=1.0),)


class TrainSection(Section):
    """The optimisation."""

    steps: Positive = Field(default=30, description="optimizer steps")
    batch_tokens: Positive | None = Field(
        default=None,
        description="instead of batch_sequences: as many sequences as have no more tokens",
    )
    batch_sequences: Positive | None = Field(
        default_factory=lambda data: None if data.get("batch_tokens") else 8,
        description="sequences in a step, over all ranks",
    )
    dtype: Literal["float32", "bfloat16", "float64"] = Field(
        default="float32",
        description="of compute; bfloat16 keeps float32 master weights and reductions",
    )
    seed: Count = Field(default=0, lt=2**63, description="of weights and data order")
    learning_rate: float = Field(default=5e-3, gt=0, description="of AdamW, after warm-up")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="how the learning rate goes on after warm-up"
    )
    warmup_steps: Count = Field(default=5, description="linear warm-up")
    min_learning_rate: float = Field(
        default=0.0, ge=0, description="of the last step; linear and cosine fall to it"
    )
    betas: tuple[Fraction, Fraction] = Field(default=(0.9, 0.95), description="of AdamW")
    weight_decay: float = Field(default=0.1, ge=0, description="of AdamW, decoupled")
    clip_norm: float = Field(default=1.0, gt=0, description="of the global gradient")
    validate_every: Positive | None = Field(
        default=None, description="steps between looks at the held-out rows; null: only at the end"
    )
    max_nonfinite_steps: Positive = Field(
        default=3, description="in a row with a non-finite gradient that end the run"
    )

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        _check_one_of("train", batch_sequences=self.batch_sequences, batch_tokens=self.batch_tokens)
        return self

    @model_validator(mode="after")
    def _falling(self) -> Self:
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(
                f"train.min_learning_rate ({self.min_learning_rate:g}) must not be greater than "
                f"train.learning_rate ({self.learning_rate:g})"
            )
        return self


class PlannerSection(Section):
    """How steps are planned."""

    preset: Text = Field(default="auto", description="cost model: a preset's name; auto: by device")
    prefetch: Positive = Field(default=1, description="steps planned ahead")
    capacity: Positive | None = Field(
        default=None, description="tokens a rank can hold; default: from its memory"
    )
    degrees: tuple[Positive, ...] | None = Field(
        default=None,
        min_length=1,
        description="sequence-parallel degrees allowed; default: all legal ones",
    )
    communicators_per_rank: Positive = Field(
        default=16, description="cached communicators of a rank"
    )
    tight_bound: bool | None = Field(
        default=None,
        description="bound every plan tightly, on a core of the head; default: with GPUs",
    )


class CheckpointSection(Section):
    """What is kept to go on from."""

    every: Positive | None = Field(
        default=500, description="steps; null: only at the end and when the run is stopped"
    )
    keep: Positive = Field(default=2, description="newest checkpoints that are kept")
    copy_every: Positive = Field(
        default=1,
        description="steps between copies of the state to another rank's memory; as many steps run "
        "again after a death",
    )
    dir: Text | None = Field(
        default=None,
        description="folder that every node sees, or fsspec URL, in which each run gets its own; "
        "default: the run's folder",
    )


class TrackingSection(Section):
    """Weights & Biases."""

    wandb: Literal["auto", "offline", "online", "disabled"] = Field(
        default="auto", description="auto: online when logged in, else offline"
    )
    project: Text = Field(default="flexray", description="W&B project")


class Config(Section):
    """Everything a run is told. Sections are listed in docs/config.md."""

    run: RunSection = RunSection()
    cluster: ClusterSection = ClusterSection()
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    planner: PlannerSection = PlannerSection()
    checkpoint: CheckpointSection = CheckpointSection()
    tracking: TrackingSection = TrackingSection()

    @model_validator(mode="after")
    def _rows_to_look_at(self) -> Self:
        if self.train.validate_every is not None and self.data.validation is None:
            raise ValueError("train.validate_every needs held-out rows: give data.validation")
        return self

    def named(self, name: str) -> Config:
        """Return the same config for a run called `name`."""
        return self.model_copy(update={"run": self.run.model_copy(update={"name": name})})

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that JSON and YAML can hold."""
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        """Return the resolved config as YAML; `load_config` reads it back equal."""
        return yaml_text.dump(self.to_dict())


def load_config(path: Path | Mapping[str, Any] | None, overrides: list[str]) -> Config:
    """Read a YAML file (or nothing: all defaults) and lay `section.key=value` overrides over it.

    Args:
        path: The config file, or sections as a mapping, or None.
        overrides: Texts such as `train.steps=100`; the value is read as YAML. They change one key
            at a time, inside `model.config` too.

    Raises:
        UserError: The file cannot be read, or a key is unknown or its value not allowed: one line
            that names the key and where it came from.
    """
    source = str(path) if isinstance(path, Path) else "config"
    data = _read(path) if isinstance(path, Path) else _copy(path or {})
    given = [parse(text) for text in overrides]
    for override in given:
        _seed_model(data, override)
        apply(override, data)
    result = _validate(data, source)
    if isinstance(result, list):
        # `--set run.name=7` is read as a number; where text is wanted, what was typed is meant.
        wants_text = {tuple(map(str, e["loc"])) for e in result if e["type"] == "string_type"}
        for override in given:
            if override.keys in wants_text and isinstance(override.value, int | float):
                apply(override.as_typed(), data)
        result = _validate(data, source)
    if isinstance(result, list):
        raise UserError(describe(Config, result, source, given))
    return result


def _read(path: Path) -> dict[str, Any]:
    """Return the file's sections; an empty section is an absent one."""
    try:
        data = yaml_text.load(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: cannot read this config: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path}: not valid YAML: {error}") from None
    if data is not None and not isinstance(data, dict):
        raise UserError(f"{path}: must hold sections such as 'train:', not {yaml_text.kind(data)}")
    return {key: value for key, value in (data or {}).items() if value is not None}


def _copy(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Sections as a YAML file would give them: a path is text, a tuple a list."""
    try:
        copy: dict[str, Any] = json.loads(json.dumps(dict(sections), default=os.fspath))
    except (TypeError, ValueError) as error:
        raise UserError(f"config: only what YAML can hold: {error}") from None
    return copy


def _seed_model(data: dict[str, Any], override: Override) -> None:
    """Let `model.config.KEY=` without a config in the file change the default model."""
    if override.keys[:2] == ("model", "config") and len(override.keys) > 2:
        model = data.setdefault("model", {})
        if isinstance(model, dict) and not model.get("config") and not model.get("path"):
            model["config"] = dict(DEFAULT_MODEL)


def _validate(data: dict[str, Any], source: str) -> Config | list[ErrorDetails]:
    try:
        text = json.dumps(data)
    except (ValueError, RecursionError):
        raise UserError(f"{source}: an alias (*) refers to what holds it") from None
    try:
        # JSON mode is strict about types, yet takes lists for tuples and text for paths.
        return Config.model_validate_json(text)
    except ValidationError as error:
        return error.errors()
