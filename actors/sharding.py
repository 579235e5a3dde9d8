"""Parameter sharding by FSDP2 over fixed ranks, so that regrouping never moves parameters.

Gradients are summed, never averaged: the loss of a rank is already divided by the step's label
tokens. Parameters are filled one at a time from a seeded stream (or from files), each rank keeping
its own rows: no rank ever holds the whole model, and the values do not depend on the world size.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from flexray.actors.lora import plain_name
from flexray.actors.loss import LossModel
from flexray.actors.model import ModelRefused
from flexray.actors.streams import stream
from flexray.actors.timing import Stopwatch, own_work

_LEAST = {kind: torch.iinfo(kind).min for kind in (torch.int32, torch.int64)}


def shard(
    model: LossModel,
    mesh: DeviceMesh,
    watch: Stopwatch,
    *,
    compute_dtype: torch.dtype,
    activation_checkpointing: bool,
) -> None:
    """Shards `model` (on the meta device) over `mesh` (mesh.py), in place."""
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


def reshard(model: nn.Module) -> None:
    """Frees whole parameters that a forward pass without a backward has left gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def fill(
    model: LossModel,
    device: torch.device,
    tensors: Iterable[tuple[str, torch.Tensor]],
    skip: Collection[str] = (),
) -> None:
    """Gives the sharded `model` memory on `device` and its values, one whole parameter at a time.

    `tensors`: (name in the Hugging Face model, value), every parameter once, but for those in
    `skip`, which stay without values; tied ones once; adapters by their own names.
    Persistent buffers may be among them.
    Raises ModelRefused for missing or unknown names and for shapes that differ.
    """
    model.to_empty(device=device)
    _rebuild_buffers(model.model)
    parameters = {plain_name(name): p for name, p in model.model.named_parameters()}
    buffers = dict(model.model.named_buffers())
    for name, value in tensors:
        place = parameters.pop(name, None)
        if place is None:
            place = buffers.pop(name, None)
        if place is None:
            raise ModelRefused(f"weights: the model has no parameter {name}")
        if place.shape != value.shape:
            raise ModelRefused(
                f"weights: {name} has shape {tuple(value.shape)}, the model {tuple(place.shape)}"
            )
        with torch.no_grad():
            own_rows(place).copy_(value[rows_of(place)] if value.ndim else value)
    for name in parameters:
        if name not in skip:
            raise ModelRefused(f"weights: parameter {name} is missing")
    for name, buffer in model.model.named_buffers():
        _check_set(model.model, name, buffer)


def _rebuild_buffers(model: PreTrainedModel) -> None:
    """Buffers (RoPE frequencies, embedding scales) by the model's own initialiser."""
    for module in model.modules():
        buffers = list(module.buffers(recurse=False))
        if not buffers:
            continue
        for buffer in buffers:
            _forget(buffer)
        # Its parameters are not to be touched: the initialiser sees some without memory.
        twin = copy.copy(module)
        twin._parameters = {
            name: p if p is None else nn.Parameter(torch.empty(p.shape, device="meta"))
            for name, p in module._parameters.items()
        }
        model._init_weights(twin)


def _forget(tensor: torch.Tensor) -> None:
    """Fills with a value that no model has, so that what no initialiser sets can be told."""
    with torch.no_grad():
        tensor.fill_(torch.nan if tensor.is_floating_point() else _LEAST.get(tensor.dtype, 0))


def _check_set(model: PreTrainedModel, name: str, tensor: torch.Tensor) -> None:
    """Raises ModelRefused for a tensor that holds what `_forget` put there."""
    least = _LEAST.get(tensor.dtype)
    if tensor.isnan().any() or (least is not None and (tensor == least).any()):
        raise ModelRefused(
            f"model {model.config.model_type}: neither its initialiser nor weights set {name}; "
            "give a folder of weights that has it or use another model"
        )


def own_rows(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a sharded parameter, as a plain tensor that shares its memory."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def rows_of(parameter: torch.Tensor) -> slice:
    """Which rows (of dim 0) of the whole parameter this rank holds."""
    if not isinstance(parameter, DTensor):
        return slice(None)
    mesh = parameter.device_mesh
    return slice(*chunk(parameter.shape[0], mesh.size(-1), mesh.get_local_rank(-1)))


def chunk(rows: int, owners: int, owner: int) -> tuple[int, int]:
    """Start and stop of the rows that `owner` holds, as torch.chunk cuts: the last may get none."""
    size = -(-rows // owners)
    start = min(owner * size, rows)
    return start, min(start + size, rows)


def initial_parameters(
    model: PreTrainedModel, weights: Path | None, seed: int, skip: Collection[str] = ()
) -> Iterator[tuple[str, torch.Tensor]]:
    """What training starts from: the files of a folder, or random values for `seed`."""
    if weights is None:
        return random_parameters(model, seed, skip)
    return saved_parameters(model, weights, skip)


def random_parameters(
    model: PreTrainedModel, seed: int, skip: Collection[str] = ()
) -> Iterator[tuple[str, torch.Tensor]]:
    """Random values for `model` (on the meta device; not changed) by its own initialiser.

    Of all parameters but those in `skip`. Each module draws from a stream that its name and the
    seed decide, so that a parameter is the same whatever the world size, and only one module's
    parameters are in memory at a time.
    """
    seen: set[int] = set()
    for name, module in model.named_modules():
        own = [(n, p) for n, p in module.named_parameters(recurse=False) if id(p) not in seen]
        seen.update(id(p) for _, p in own)
        prefix = f"{name}." if name else ""
        own = [(n, p) for n, p in own if prefix + n not in skip]
        if not own:
            continue
        twin = copy.deepcopy(module) if not list(module.children()) else _without_children(module)
        twin.to_empty(device="cpu", recurse=False)
        for parameter in twin.parameters(recurse=False):
            _forget(parameter)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(stream(seed, name))
            model._init_weights(twin)
        for parameter_name, _ in own:
            value = getattr(twin, parameter_name).detach()
            _check_set(model, prefix + parameter_name, value)
            yield prefix + parameter_name, value


def saved_parameters(
    model: PreTrainedModel, folder: Path, skip: Collection[str] = ()
) -> Iterator[tuple[str, torch.Tensor]]:
    """The values in the weights of a Hugging Face folder but those in `skip`, memory-mapped.

    Raises ModelRefused when there are none or a file cannot be read.
    """
    wanted = {name for name, _ in model.named_parameters()}
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - wanted
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a dict)
                    if name not in tied and name not in skip:
                        yield name, tensors.get_tensor(name)
        except SafetensorError as error:
            raise ModelRefused(f"{file}: cannot read: {' '.join(str(error).split())}") from None


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a Hugging Face folder that are the model's.

    Those that its index names, else model.safetensors, else all: beside them there may be weights
    in other layouts and adapters. Raises ModelRefused when there are none.
    """
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            files = [folder / name for name in names]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ModelRefused(f"{index}: not an index of weights") from None
        for file in files:
            if not file.is_file():
                raise ModelRefused(f"{file}: no such file, and {index.name} names it")
    elif single.is_file():
        files = [single]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelRefused(f"{folder}: no *.safetensors file to take the weights from")
    return files


def _without_children(module: nn.Module) -> nn.Module:
    """A copy of a module that has parameters of its own beside its submodules."""
    twin = copy.copy(module)
    twin._parameters, twin._buffers = dict(module._parameters), dict(module._buffers)
    return twin
