"""A measured preset: the YAML that flexray/presets.py reads."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from flexray import __version__, yaml_text
from flexray.measurement.fit import Fit
from flexray.measurement.measure import Measurements
from flexray.measurement.memory import Memory
from flexray.model_preparation import ModelJob
from flexray.presets import Preset
from flexray.solver.cost import CostModel


@dataclass(frozen=True)
class MemoryTerms:
    """Memory as the planner counts it, and what of it was measured."""

    usable_mb: float
    buffers_mb: float
    mb_per_token: float
    is_measured: bool

    @classmethod
    def of(cls, cost: CostModel, memory: Memory | None, device: str, gpus: int) -> MemoryTerms:
        """`cost`: the estimate, whose terms stay where `memory` was not told.

        On GPUs logits, and what is there besides model states and tokens, are buffers. What a CPU
        process holds besides them is in the estimate's margin.
        """
        if memory is None:
            return cls(cost.usable_mb, 0.0, cost.mb_per_token, is_measured=False)
        buffers = 0.0
        if device == "cuda":
            buffers = memory.logits_mb + max(0.0, memory.fixed_mb - cost.states_mb(gpus))
        return cls(cost.usable_mb, buffers, memory.mb_per_token, is_measured=True)


def preset_yaml(job: ModelJob, measured: Measurements, fit: Fit, memory: MemoryTerms) -> str:
    """The file, with a comment that says how and when it was measured."""
    cost, cluster = fit.cost, measured.cluster
    preset = {
        "source": f"measured by flexray profile on {measured.where}",
        "estimate": False,
        "heads": job.model.num_attention_heads,
        "kv_heads": job.kv_heads,
        "degrees": list(measured.degrees),
        "max_length": job.longest,
        "cluster": {"gpus": cluster.gpus, "gpus_per_node": cluster.largest_node},
        "time": {
            "ms_per_token_squared": _short(cost.quadratic),
            "ms_per_token": _short(cost.linear),
            "ms_per_sequence": _short(cost.per_sequence),
            "ms_per_micro_step": _short(cost.micro_step_ms),
            "exchange_mb_per_token": _short(cost.exchange_mb_per_token),
            "exchange_ms": _short(cost.exchange_ms),
            "bandwidth_mb_per_ms": {
                d: _short(speed)
                for d, speed in cost.bandwidth
                if d in measured.degrees[1:] or len(measured.degrees) == 1
            },
        },
        "memory": {
            "usable_mb": _short(memory.usable_mb),
            "parameters": job.parameters,
            "bytes_per_parameter": _short(cost.state_mb * 2**20 / job.parameters),
            "buffers_mb": _short(memory.buffers_mb),
            "mb_per_token": _short(memory.mb_per_token),
            "communicator_mb": _short(cost.communicator_mb),
            "communicators": cost.communicators,
        },
    }
    Preset.model_validate(preset)
    return "".join(f"# {line}\n" for line in _header(job, measured, memory)) + yaml_text.dump(
        preset
    )


def _header(job: ModelJob, measured: Measurements, memory: MemoryTerms) -> list[str]:
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    told = "measured" if memory.is_measured else "estimated from the model's shape"
    config, shard = job.config, job.config.cluster.shard_size
    return [
        f"Measured by `flexray profile` (FlexRay {__version__}) on {now} with up to "
        f"{measured.tokens:,}",
        f"random tokens a rank: {job.parameters:,} parameters of {job.model.model_type}, "
        f"{config.train.dtype},",
        f"activation checkpointing {'on' if config.model.activation_checkpointing else 'off'}, "
        f"copies of the model {f'on {shard} ranks each' if shard else 'sharded over all ranks'}.",
        f"Memory of a token is {told}, that of a communicator estimated.",
        "docs/profile.md says how.",
    ]


def _short(value: float) -> float:
    """Six digits: no measurement has more."""
    return float(f"{value:.6g}")
