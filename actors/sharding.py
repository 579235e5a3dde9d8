"""Parameter sharding by FSDP2 over the whole world, so that regrouping never moves parameters.

Gradients are summed, never averaged: the loss of a rank is already divided by the step's label
tokens. Parameters are filled one at a time from a seeded stream (or from files), each rank keeping
its own rows: no rank ever holds the whole model, and the values do not depend on the world size.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from flexray.actors.loss import LossModel
from flexray.actors.model import ModelRefused
from flexray.actors.timing import Stopwatch, own_work


def shard(
    model: LossModel,
    mesh: DeviceMesh,
    watch: Stopwatch,
    *,
    compute_dtype: torch.dtype,
    activation_checkpointing: bool,
) -> None:
    """Shards `model` (on the meta device, masters' dtype) over the 1-D `mesh`, in place."""
    if activation_checkpointing:
        model.model.gradient_checkpointing_enable({"use_reentrant": False})
    policy = MixedPrecisionPolicy()
    if compute_dtype == torch.bfloat16:
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
        )
        layer_policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    else:
        layer_policy = policy
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=layer_policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # A pure sum, also on gloo, which knows no PREMUL_SUM.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    for layer in model.layers:
        layer.forward = own_work(layer.forward, watch)


def fill(
    model: LossModel, device: torch.device, tensors: Iterator[tuple[str, torch.Tensor]]
) -> None:
    """Gives the sharded `model` memory on `device` and its values, one whole parameter at a time.

    `tensors`: (name in the Hugging Face model, value), every parameter once; tied ones once.
    Raises ModelRefused for missing or unknown names and for shapes that differ.
    """
    model.to_empty(device=device)
    parameters = dict(model.model.named_parameters())
    for name, value in tensors:
        if name not in parameters:
            raise ModelRefused(f"weights: the model has no parameter {name}")
        parameter = parameters.pop(name)
        if parameter.shape != value.shape:
            raise ModelRefused(
                f"weights: {name} has shape {tuple(value.shape)}, "
                f"in the model {tuple(parameter.shape)}"
            )
        with torch.no_grad():
            own_rows(parameter).copy_(value[rows_of(parameter)])
    if parameters:
        raise ModelRefused(f"weights: parameter {next(iter(parameters))} is missing")
    for module in model.modules():
        # to_empty wiped the buffers (RoPE frequencies): the model's own initialiser rebuilds them.
        if list(module.buffers(recurse=False)) and not list(module.parameters(recurse=False)):
            model.model._init_weights(module)


def own_rows(parameter: nn.Parameter) -> torch.Tensor:
    """This rank's rows of a sharded parameter, as a plain tensor that shares its memory."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def rows_of(parameter: nn.Parameter) -> slice:
    """Which rows (of dim 0) of the whole parameter this rank holds."""
    if not isinstance(parameter, DTensor):
        return slice(None)
    mesh, total = parameter.device_mesh, parameter.shape[0]
    size = -(-total // mesh.size())
    start = min(mesh.get_local_rank() * size, total)
    return slice(start, min(start + size, total))


def random_parameters(model: PreTrainedModel, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Random values for `model` (on the meta device; not changed) by its own initialiser.

    Each module draws from a stream that its name and the seed decide, so that a parameter is the
    same whatever the world size, and only one module's parameters are in memory at a time.
    """
    seen: set[int] = set()
    for name, module in model.named_modules():
        own = [(n, p) for n, p in module.named_parameters(recurse=False) if id(p) not in seen]
        if not own:
            continue
        seen.update(id(p) for _, p in own)
        twin = copy.deepcopy(module) if not list(module.children()) else _without_children(module)
        twin.to_empty(device="cpu", recurse=False)
        digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int.from_bytes(digest, "little") >> 1)
            model._init_weights(twin)
        for parameter_name, _ in own:
            full_name = f"{name}.{parameter_name}" if name else parameter_name
            yield full_name, getattr(twin, parameter_name).detach()


def saved_parameters(model: PreTrainedModel, folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The values in the safetensors files of a Hugging Face folder, memory-mapped.

    Raises ModelRefused when there are none.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelRefused(f"{folder}: no *.safetensors file")
    wanted = {name for name, _ in model.named_parameters()}
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - wanted
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                if name not in tied:
                    yield name, tensors.get_tensor(name)


def _without_children(module: nn.Module) -> nn.Module:
    """A copy of a module that has parameters of its own beside its submodules."""
    twin = copy.copy(module)
    twin._parameters = dict(module._parameters)
    return twin
