"""What is trained and how, as every rank is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PretrainedConfig

from flexray.actors.lora import Lora
from flexray.actors.loss import TokenLoss, cross_entropy
from flexray.actors.model import ModelFactory
from flexray.actors.schedule import Schedule, learning_rate


@dataclass(frozen=True)
class EngineSettings:
    """All that decides what is trained and how, the same on every rank."""

    model: PretrainedConfig
    model_factory: ModelFactory | None = None  # None: the configuration's own class
    token_loss: TokenLoss = cross_entropy
    weights: Path | None = None  # a folder of safetensors; None: random
    lora: Lora | None = None  # adapters to train instead of the weights
    dtype: str = "float32"  # bfloat16: bfloat16 compute, float32 masters and reductions
    seed: int = 0
    shard_size: int | None = None  # ranks that share parameters, states, gradients; None: all
    attention: str = "auto"
    activation_checkpointing: bool = False
    loss_chunk: int = 1024  # tokens whose logits are in memory at once
    learning_rate: float = 1e-3
    schedule: Schedule = "constant"
    warmup_steps: int = 0
    min_learning_rate: float = 0.0
    steps: int = 1  # of the whole run, which the schedule ends with
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    timeout_s: float = 300.0  # of a collective

    def learning_rate_of(self, update: int) -> float:
        """The rate of update number `update` of the run; the first is 1."""
        return learning_rate(
            update,
            schedule=self.schedule,
            peak=self.learning_rate,
            floor=self.min_learning_rate,
            warmup=self.warmup_steps,
            updates=self.steps,
        )

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of forward and backward."""
        return {
            "float32": torch.float32,
            "float64": torch.float64,
            "bfloat16": torch.bfloat16,
        }[self.dtype]

    @property
    def master_dtype(self) -> torch.dtype:
        """The dtype of parameters, gradients and optimizer state."""
        return torch.float64 if self.dtype == "float64" else torch.float32

    @property
    def base_dtype(self) -> torch.dtype:
        """The dtype of the model's own parameters: under adapters they are frozen."""
        return self.compute_dtype if self.lora else self.master_dtype
