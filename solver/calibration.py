"""Measured times back into the cost model: one robust non-negative least-squares fit.

Whole-step times do not identify the coefficients (per-layer parameter collectives make every rank
as slow as the slowest group), so ranks report spans of their own work, micro-step by micro-step.

A group of degree d with n sequences of S tokens and Q squared tokens in all takes on each rank

    compute_ms = quadratic * Q / d + linear * S / d + per_sequence * n
    comm_ms    = exchange_mb_per_token * S / d / bandwidth(d) + exchange_ms         if d > 1

and a step takes micro_step_ms per micro-step beside the work of its slowest groups. All of it is
linear in what is fitted (in 1 / bandwidth). Unknowns are multiples of the present coefficients,
first scaled to the data: what the data do not tell apart keeps its shape.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from flexray.solver.cost import CostModel

Floats = npt.NDArray[np.float64]

# Pull of an unknown towards its scaled prior, against relative residuals of about 1. It decides
# only what the data leave open.
PULL = 1e-4
# Residuals beyond this many robust standard deviations lose weight (Huber).
HUBER = 1.5
ROUNDS = 20


@dataclass(frozen=True)
class Span:
    """One rank's own work in one micro-step.

    Attributes:
        degree: of its group. tokens, squares, sequences: of the group's pack: tokens, sum of
            squared lengths, number of sequences.
        compute_ms: forward and backward without collectives.
        comm_ms: the group's all-to-alls.
    """

    degree: int
    tokens: int
    squares: float
    sequences: int
    compute_ms: float
    comm_ms: float


@dataclass(frozen=True)
class StepSpan:
    """One whole step: what its slowest groups' work was to take, and what it took.

    `work_ms` is the sum over micro-steps of the slowest group's planned own-work time.
    """

    work_ms: float
    micro_steps: int
    measured_ms: float


class Calibrator:
    """A cost model that follows the last `window` spans.

    `version` counts the fits that changed the model.
    """

    def __init__(self, cost: CostModel, window: int = 512) -> None:
        self.cost = cost
        self.version = 0
        self._spans: deque[Span] = deque(maxlen=window)
        self._steps: deque[StepSpan] = deque(maxlen=max(1, window // 8))

    def observe(self, *spans: Span | StepSpan) -> None:
        """Adds measurements; the oldest leave the window."""
        for span in spans:
            if isinstance(span, StepSpan):
                self._steps.append(span)
            elif span.tokens > 0:
                self._spans.append(span)

    def fit(self) -> CostModel:
        """The cost model of the window; the present one while there is nothing to fit."""
        fitted = self._fit_micro_step(self._fit_exchange(self._fit_compute(self.cost)))
        if fitted != self.cost:
            self.cost = fitted
            self.version += 1
        return self.cost

    def _fit_compute(self, cost: CostModel) -> CostModel:
        spans = [s for s in self._spans if s.compute_ms > 0]
        if not spans:
            return cost
        design = np.array([(s.squares / s.degree, s.tokens / s.degree, s.sequences) for s in spans])
        prior = np.array([cost.quadratic, cost.linear, cost.per_sequence])
        quadratic, linear, per_sequence = _fit(
            design, np.array([s.compute_ms for s in spans]), prior
        )
        return replace(cost, quadratic=quadratic, linear=linear, per_sequence=per_sequence)

    def _fit_exchange(self, cost: CostModel) -> CostModel:
        spans = [s for s in self._spans if s.degree > 1 and s.comm_ms > 0]
        if not spans or cost.exchange_mb_per_token == 0:
            return cost
        seen = sorted({s.degree for s in spans})
        listed = sorted({*seen, *(d for d, _ in cost.bandwidth)})
        design = np.zeros((len(spans), len(seen) + 1))
        for i, s in enumerate(spans):
            design[i, seen.index(s.degree)] = cost.exchange_mb_per_token * s.tokens / s.degree
            design[i, -1] = 1.0
        prior = np.array([*(1 / cost.bandwidth_at(d) for d in seen), cost.exchange_ms])
        *slowness, exchange_ms = _fit(design, np.array([s.comm_ms for s in spans]), prior)
        # Degrees that no group had keep their relation to those that some group had.
        scale = float(np.median(np.array(slowness) / np.maximum(prior[:-1], 1e-12)))
        now = dict(zip(seen, slowness, strict=True))
        bandwidth = tuple(
            (d, 1 / max(now[d] if d in now else scale / cost.bandwidth_at(d), 1e-9)) for d in listed
        )
        return replace(cost, bandwidth=bandwidth, exchange_ms=exchange_ms)

    def _fit_micro_step(self, cost: CostModel) -> CostModel:
        if not self._steps:
            return cost
        rest = [(s.measured_ms - s.work_ms) / s.micro_steps for s in self._steps if s.micro_steps]
        return replace(cost, micro_step_ms=max(0.0, float(np.median(rest)))) if rest else cost


def _fit(design: Floats, measured: Floats, prior: Floats) -> list[float]:
    """Non-negative coefficients for `design` (n, c) @ coefficients = `measured` (n,).

    Residuals are relative to what was measured (spans range over orders of magnitude), weighted
    by Huber's rule so that a stalled rank does not count.
    """
    typical = design.mean(axis=0)
    share = float(np.median(measured))
    # A coefficient that was 0 can still appear: its unit is a hundredth of a typical span.
    unit = np.maximum(prior, 0.01 * share / np.maximum(typical, 1e-12))
    predicted = design @ prior
    ratio = float(np.median(measured / np.maximum(predicted, 1e-12))) if predicted.any() else 1.0
    scaled = np.where(prior > 0, np.maximum(prior * ratio, 1e-30), unit)
    target = np.where(prior > 0, 1.0, 0.0)

    a = design * scaled / measured[:, None]
    b = np.ones(len(measured))
    pull = PULL * np.eye(len(prior))
    weight = np.ones(len(measured))
    multiple = target
    for _ in range(ROUNDS):
        root = np.sqrt(weight)
        multiple, _ = nnls(
            np.vstack([a * root[:, None], pull]), np.concatenate([b * root, PULL * target])
        )
        residual = np.abs(a @ multiple - b)
        deviation = 1.4826 * float(np.median(residual)) + 1e-9
        weight = np.minimum(1.0, HUBER * deviation / np.maximum(residual, 1e-12))
    return [float(c) for c in multiple * scaled]
