"""What a step costs: a few coefficients, and the options that they make.

Times are milliseconds, lengths tokens, sizes MB (2^20 bytes). The form is FlexSP's (Wang et al.,
ASPLOS 2025, arXiv 2412.01523, section 4), with a cost per sequence and per communicator added.

A group of degree d with sequences s_k takes, on each of its ranks,

    (sum(quadratic * s_k^2 + linear * s_k)) / d + per_sequence * sequences         compute
    + exchange_mb_per_token * sum(s_k) / (d * bandwidth(d)) + exchange_ms          if d > 1

and a micro-step takes its slowest group's time plus micro_step_ms. The rest of the planner sees
only `Option`s, so that other attention strategies are other options, not another model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

from flexray.solver.cluster import Cluster
from flexray.solver.plan import PlanningError

# cu_seqlens are 32-bit: a pack never has more tokens.
MAX_PACK_TOKENS = 2**31 - 1


@dataclass(frozen=True)
class Option:
    """One kind of group: what a sequence costs in it and what fits.

    A group's time is `fixed + sum(quadratic * s^2 + linear * s + per_sequence)` ms, on ranks of
    speed 1. `capacity` is in tokens of the whole group: a multiple of the degree, so that
    padding a pack to a multiple of the degree never overflows a rank.
    """

    degree: int
    quadratic: float
    linear: float
    per_sequence: float
    fixed: float
    capacity: int


@dataclass(frozen=True)
class CostModel:
    """Coefficients of compute, all-to-all and memory.

    Attributes:
        quadratic: ms per token^2 on one GPU (attention); FlexSP's a1.
        linear: ms per token on one GPU; FlexSP's a2.
        per_sequence: ms per sequence on every rank of its group (one attention call on a CPU).
        micro_step_ms: fixed ms of a micro-step (parameter collectives); FlexSP's b1.
        exchange_mb_per_token: all-to-all MB per token of a pack, forward and backward, all layers.
        exchange_ms: fixed ms of a group's all-to-alls when it has more than one rank; b2.
        bandwidth: (degree, MB per ms) of a rank's all-to-all, ascending degrees. A degree that
            is not listed takes the next larger listed one's (a group of 12 on nodes of 8 crosses
            nodes as one of 16 does), beyond the last the last one's.
        usable_mb: memory of one GPU that a step may use.
        state_mb: parameters, gradients and optimizer state of the whole model.
        shard_size: GPUs that share one copy of them; None: all.
        buffers_mb: what a GPU holds beside these whatever its tokens: parameters that are gathered.
        mb_per_token: activations and logits of a token on the rank that holds it.
        communicator_mb: memory of one communicator.
        communicators: communicators that a rank may hold at once.
        tokens_per_gpu: if set, what a GPU holds, whatever the memory terms say.
    """

    quadratic: float
    linear: float
    per_sequence: float = 0.0
    micro_step_ms: float = 0.0
    exchange_mb_per_token: float = 0.0
    exchange_ms: float = 0.0
    bandwidth: tuple[tuple[int, float], ...] = ()
    usable_mb: float = 0.0
    state_mb: float = 0.0
    shard_size: int | None = None
    buffers_mb: float = 0.0
    mb_per_token: float = 0.0
    communicator_mb: float = 0.0
    communicators: int = 0
    tokens_per_gpu: int | None = None

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name == "bandwidth":
                for degree, speed in value:
                    if not (math.isfinite(speed) and speed > 0):
                        raise PlanningError(
                            f"cost model: bandwidth at degree {degree} is {speed}: "
                            "it must be a finite number above 0"
                        )
            elif value is not None and not (math.isfinite(value) and value >= 0):
                raise PlanningError(
                    f"cost model: {f.name} is {value}: it must be a finite number, 0 or more"
                )

    def with_capacity(self, tokens: int) -> CostModel:
        """The same times with `tokens` per GPU, whatever the memory terms say."""
        if tokens < 1:
            raise PlanningError(f"capacity must be at least 1 token per GPU: it is {tokens}")
        return replace(self, tokens_per_gpu=tokens)

    def capacity(self, gpus: int) -> int:
        """Tokens that one of `gpus` GPUs holds beside its share of the model states.

        Raises:
            PlanningError: nothing fits, or no memory term is given.
        """
        if self.tokens_per_gpu is not None:
            return self.tokens_per_gpu
        if self.mb_per_token == 0:
            raise PlanningError(
                "cost model: memory is not limited: give mb_per_token and usable_mb, "
                "or tokens_per_gpu (--capacity)"
            )
        fixed = self.fixed_mb(gpus)
        tokens = math.floor((self.usable_mb - fixed) / self.mb_per_token)
        if tokens < 1:
            raise PlanningError(
                f"the model does not fit {gpus} GPUs: states and communicators take {fixed:.0f} MB "
                f"of {self.usable_mb:.0f} MB on each; use "
                + ("a larger shard_size" if self.shard_size else "more GPUs")
                + " or a smaller model"
            )
        return tokens

    def states_mb(self, gpus: int) -> float:
        """Of the model states, on each of `gpus` GPUs."""
        return self.state_mb / (self.shard_size or gpus)

    def fixed_mb(self, gpus: int) -> float:
        """Of all that no token takes, on each of `gpus` GPUs."""
        communicators_mb = self.communicators * self.communicator_mb
        return self.states_mb(gpus) + self.buffers_mb + communicators_mb

    def bandwidth_at(self, degree: int) -> float:
        """MB per ms of one rank's all-to-all in a group of `degree`."""
        for listed, speed in self.bandwidth:
            if listed >= degree:
                return speed
        return self.bandwidth[-1][1] if self.bandwidth else math.inf

    def options(self, cluster: Cluster, degrees: Iterable[int]) -> tuple[Option, ...]:
        """One Ulysses option for each degree that the cluster has room for, ascending.

        Raises:
            PlanningError: no degree is left, or one is below 1.
        """
        wanted = sorted(set(degrees))
        if wanted and wanted[0] < 1:
            raise PlanningError(f"degree {wanted[0]}: degrees start at 1")
        usable = [d for d in wanted if d <= cluster.gpus]
        if not usable:
            raise PlanningError(
                f"no legal degree for {cluster.gpus} GPUs: degrees {wanted or 'none'}; "
                "allow a smaller degree or use more GPUs"
            )
        tokens = self.capacity(cluster.gpus)
        return tuple(self._ulysses(d, tokens) for d in usable)

    def _ulysses(self, d: int, tokens: int) -> Option:
        exchange = self.exchange_mb_per_token / self.bandwidth_at(d) if d > 1 else 0.0
        return Option(
            degree=d,
            quadratic=self.quadratic / d,
            linear=(self.linear + exchange) / d,
            per_sequence=self.per_sequence,
            fixed=self.exchange_ms if d > 1 else 0.0,
            capacity=min(tokens, MAX_PACK_TOKENS // d) * d,
        )
