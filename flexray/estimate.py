"""A first cost model from the model's shape, for runs without a measured preset.

Counts of floating-point operations and bytes are the usual ones (Narayanan et al., SC 2021, arXiv
2104.04473; Korthikanti et al., MLSys 2023, arXiv 2205.05198, for activations); what a device does
a second is a guess that the reports of the first steps replace.
"""

from __future__ import annotations

from dataclasses import dataclass

from flexray.solver.cost import CostModel

MB = 2**20


@dataclass(frozen=True)
class Shape:
    """What of a model's configuration decides its cost."""

    parameters: int
    trained: int  # of them; the others are frozen, without gradient and optimizer state
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    value_bytes: int  # of an activation in the compute dtype
    state_bytes: int  # of all parameters with their gradients and optimizer states
    activation_checkpointing: bool


@dataclass(frozen=True)
class Device:
    """What one rank has. Speeds in operations and MB per ms."""

    flops_per_ms: float
    memory_mb: float
    exchange_mb_per_ms: tuple[tuple[int, float], ...]  # all-to-all of a rank, by degree
    gather_mb_per_ms: tuple[tuple[int, float], ...]  # parameter collectives, by number of ranks
    call_ms: float  # starting one operation, where every sequence is attended to by itself


def cpu(cores: int, ranks: int, memory_mb: float) -> Device:
    """A rank's share of a machine that `ranks` ranks share; gloo over the loopback."""
    return Device(
        flops_per_ms=2e7 * min(1.0, cores / ranks),
        memory_mb=memory_mb / ranks,
        exchange_mb_per_ms=((1, 0.5),),
        gather_mb_per_ms=((1, 0.3),),
        call_ms=0.05,
    )


def gpu(name: str, memory_mb: float) -> Device:
    """A data-centre GPU at 40% of its published dense bf16 rate; NVLink inside a node of 8."""
    published_tflops = {"A100": 312, "H100": 989, "H200": 989, "B200": 2250}
    tflops = next((v for k, v in published_tflops.items() if k in name), 150)
    return Device(
        flops_per_ms=0.4 * tflops * 1e9,
        memory_mb=memory_mb,
        exchange_mb_per_ms=((8, 100.0), (16, 10.0)),
        gather_mb_per_ms=((8, 100.0), (16, 20.0)),
        call_ms=0.0,
    )


def estimate_cost(
    shape: Shape, device: Device, gpus: int, communicators: int, shard_size: int | None = None
) -> CostModel:
    """The cost model of `shape` on `gpus` ranks of `device`, each with so many communicators.

    `shard_size` ranks share one copy of the states; None: all do.
    """
    passes = 4 if shape.activation_checkpointing else 3  # forward, twice that backward, recompute
    # A frozen parameter passes gradients on and has none of its own.
    products = (passes - 1) * shape.parameters + shape.trained
    attended = shape.heads * shape.head_size
    exchanged = 2 * (shape.heads + min(shape.kv_heads, shape.heads)) * shape.head_size
    exchanges = 3 if shape.activation_checkpointing else 2
    if shape.activation_checkpointing:
        activations = shape.layers * shape.hidden * shape.value_bytes
    else:
        # Inputs of each product and norm of a layer: hidden-sized, attention and the MLP.
        width = 6 * shape.hidden + 2 * attended + exchanged + 4 * shape.intermediate
        activations = shape.layers * width * shape.value_bytes
    # Of parameters, forward and backward, and of gradients. Those of replicas are summed once a
    # step, whatever the plan.
    ranks = shard_size or gpus
    gathers = (2 * shape.parameters + shape.trained) * shape.value_bytes / MB
    gather_speed = next(
        (s for most, s in device.gather_mb_per_ms if ranks <= most), device.gather_mb_per_ms[-1][1]
    )
    return CostModel(
        # Causal: half of s^2 scores, two products of 2 operations each.
        quadratic=passes * 2 * shape.layers * attended / device.flops_per_ms,
        linear=2 * products / device.flops_per_ms,
        per_sequence=passes * shape.layers * device.call_ms,
        micro_step_ms=gathers / gather_speed if ranks > 1 else 0.0,
        exchange_mb_per_token=exchanges * shape.layers * exchanged * shape.value_bytes / MB,
        exchange_ms=2 * exchanges * shape.layers * device.call_ms,
        bandwidth=device.exchange_mb_per_ms,
        usable_mb=0.85 * device.memory_mb,
        state_mb=shape.state_bytes / MB,
        shard_size=shard_size,
        mb_per_token=1.5 * activations / MB,
        # NCCL's buffers: 544 to 688 MB each were reported for large worlds (NVIDIA/nccl#964).
        communicator_mb=300.0 if device.call_ms == 0 else 1.0,
        communicators=communicators,
    )
