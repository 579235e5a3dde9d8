"""The sharded model of a generation: built without memory, sharded, then given its values."""

from __future__ import annotations

from itertools import chain

import torch
from torch.distributed.device_mesh import DeviceMesh

from flexray.actors.lora import add_adapters, plain_name, random_adapters
from flexray.actors.loss import LossModel
from flexray.actors.model import build_on_meta
from flexray.actors.settings import EngineSettings
from flexray.actors.sharding import fill, initial_parameters, shard
from flexray.actors.timing import Stopwatch


def build(
    settings: EngineSettings,
    mesh: DeviceMesh,
    device: torch.device,
    watch: Stopwatch,
    *,
    frozen_only: bool,
) -> LossModel:
    """The model that `settings` name, over `mesh`, with its initial values.

    frozen_only: trained parameters get memory and no values, since a restore writes them.
    Raises ModelRefused.
    """
    blueprint = build_on_meta(settings.model, torch.float32, settings.model_factory)
    own = build_on_meta(settings.model, settings.base_dtype, settings.model_factory)
    if settings.lora:
        add_adapters(own, settings.lora, master=settings.master_dtype)
    model = LossModel(own, settings.loss_chunk, watch, settings.token_loss)
    shard(
        model,
        mesh,
        watch,
        compute_dtype=settings.compute_dtype,
        activation_checkpointing=settings.activation_checkpointing,
    )
    skip: set[str] = set()
    if frozen_only:
        skip = {plain_name(name) for name, p in own.named_parameters() if p.requires_grad}
    tensors = initial_parameters(blueprint, settings.weights, settings.seed, skip)
    adapters = () if frozen_only else random_adapters(own, settings.seed)
    fill(model, device, chain(tensors, adapters), skip)
    return model.train()
