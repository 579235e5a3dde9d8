"""Presets: a model on a cluster as a small YAML that users copy.

The ones that come with FlexRay lie in flexray/presets/; `load_preset` takes a name or a path.
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flexray import config_errors, yaml_text
from flexray.errors import UserError
from flexray.solver.cluster import Cluster
from flexray.solver.cost import CostModel

FOLDER = Path(__file__).with_name("presets")

Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ClusterShape(_Section):
    """The cluster that the figures are for."""

    gpus: Count
    gpus_per_node: Count


class Time(_Section):
    """Coefficients of time: see `flexray.solver.cost.CostModel`."""

    ms_per_token_squared: Number
    ms_per_token: Number
    ms_per_sequence: Number = 0.0
    ms_per_micro_step: Number
    exchange_mb_per_token: Number
    exchange_ms: Number = 0.0
    bandwidth_mb_per_ms: dict[Count, Positive]


class Memory(_Section):
    """Coefficients of memory; MB are 2^20 bytes."""

    usable_mb: Number
    parameters: Annotated[int, Field(ge=0)]
    parameters_per_position: Annotated[int, Field(ge=0)] = 0
    bytes_per_parameter: Number
    buffers_mb: Number = 0.0
    mb_per_token: Positive
    communicator_mb: Number = 0.0
    communicators: Annotated[int, Field(ge=0)] = 0


class Preset(_Section):
    """A model on a cluster.

    Attributes:
        source: where the figures are from. estimate: they were derived, not measured.
        degrees: group sizes that the planner may use.
        max_length: tokens of the longest sequence that the model takes.
    """

    source: str
    estimate: bool
    heads: Count
    kv_heads: Count
    degrees: Annotated[tuple[Count, ...], Field(min_length=1)]
    max_length: Count
    cluster_shape: Annotated[ClusterShape, Field(alias="cluster")]
    time: Time
    memory: Memory

    @property
    def cluster(self) -> Cluster:
        """The cluster that the figures are for."""
        return Cluster.uniform(self.cluster_shape.gpus, self.cluster_shape.gpus_per_node)

    @property
    def cost(self) -> CostModel:
        """The planner's cost model."""
        time, memory = self.time, self.memory
        parameters = memory.parameters + memory.parameters_per_position * self.max_length
        return CostModel(
            quadratic=time.ms_per_token_squared,
            linear=time.ms_per_token,
            per_sequence=time.ms_per_sequence,
            micro_step_ms=time.ms_per_micro_step,
            exchange_mb_per_token=time.exchange_mb_per_token,
            exchange_ms=time.exchange_ms,
            bandwidth=tuple(sorted(time.bandwidth_mb_per_ms.items())),
            usable_mb=memory.usable_mb,
            state_mb=parameters * memory.bytes_per_parameter / 2**20,
            buffers_mb=memory.buffers_mb,
            mb_per_token=memory.mb_per_token,
            communicator_mb=memory.communicator_mb,
            communicators=memory.communicators,
        )

    def with_max_length(self, tokens: int) -> Preset:
        """The same model with longer or shorter learned positions."""
        return self.model_copy(update={"max_length": tokens})


def preset_names() -> list[str]:
    """Names of the presets that come with FlexRay."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load_preset(name_or_path: str | Path) -> Preset:
    """Reads a preset by name, or a YAML file of one.

    Raises:
        UserError: there is none, or it has an unknown, missing or impossible value; names the
            file and the key.
    """
    path = Path(name_or_path)
    if path.suffix not in {".yaml", ".yml"} and not path.is_file():
        path = FOLDER / f"{name_or_path}.yaml"
        if not path.is_file():
            raise UserError(_unknown(str(name_or_path)))
    try:
        data: Any = yaml_text.load(path.read_bytes())
    except OSError as error:
        raise UserError(f"preset {path}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"preset {path}: {error}") from None
    try:
        return Preset.model_validate(data)
    except ValidationError as error:
        what = config_errors.describe(Preset, error.errors(), f"preset {path}", ())
        raise UserError(what) from None


def _unknown(name: str) -> str:
    near = get_close_matches(name, preset_names(), 1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(preset_names())}"
    return f"no preset {name}: {hint} (or give the path of a YAML file)"
