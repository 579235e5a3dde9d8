"""Measured times back into the cost model: a robust non-negative least-squares fit.

Whole-step times do not identify the coefficients (per-layer parameter collectives make every rank
as slow as the slowest group), so ranks report spans of their own work, micro-step by micro-step.

A group of degree d with n sequences of S tokens and Q squared tokens in all takes on a rank

    compute_ms = (quadratic * Q / d + linear * S / d + per_sequence * n) / speed of the rank
    comm_ms    = exchange_mb_per_token * S / d / bandwidth(d) + exchange_ms         if d > 1

and a step takes step_ms and, per micro-step, micro_step_ms beside its slowest groups' work. All is
linear in what is fitted (in 1 / bandwidth). Unknowns are multiples of the present coefficients,
first scaled to the data: what the data do not tell apart keeps its shape. Newer steps count more.

Usage:
    calibrator = Calibrator(cost, ranks=range(4))
    calibrator.observe(step_spans)
    calibrator.fit()
    calibrator.cost, calibrator.speeds
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy.linalg import solve_triangular
from scipy.optimize import nnls

from flexray.solver.cost import CostModel
from flexray.solver.memory import Peak, with_memory, with_peaks

Floats = npt.NDArray[np.float64]

WINDOW = 32  # steps that training learns from
HALF_LIFE = 8.0  # steps after which one counts half
# Pull of an unknown towards its scaled prior, against that of the data. It decides only what they
# leave open.
PULL = 1e-8
# Residuals beyond this many robust standard deviations lose weight (Huber).
HUBER = 1.5
ROUNDS = 20
# A rank is as fast as the others unless it differs by this share, and keeps the speed that it is
# known by unless that is off by it: else plans would follow the noise.
NOTICED = 0.15
SOONEST = 4  # steps that a rank's speed is told from, at least


@dataclass(frozen=True)
class Span:
    """One rank's own work in one micro-step.

    Attributes:
        degree: of its group. tokens, squares, sequences: of the group's pack: tokens, sum of
            squared lengths, number of sequences. No tokens: the rank had nothing to do.
        compute_ms: forward and backward without collectives.
        comm_ms: the group's all-to-alls.
    """

    rank: int
    micro_step: int
    degree: int
    tokens: int
    squares: float
    sequences: int
    compute_ms: float
    comm_ms: float


@dataclass(frozen=True)
class StepSpans:
    """One step: the spans of all ranks, and what all of it took.

    `is_usual`: whether its whole time tells anything. One that made communicators does not.
    `peaks`: of ranks whose peaks tell what the step took.
    """

    spans: tuple[Span, ...]
    measured_ms: float
    is_usual: bool = True
    peaks: tuple[Peak, ...] = ()


@dataclass(frozen=True)
class _Step:
    """A step as arrays, (spans,) each."""

    rank: npt.NDArray[np.intp]
    micro_step: npt.NDArray[np.intp]
    degree: npt.NDArray[np.intp]
    tokens: Floats
    squares: Floats
    sequences: Floats
    compute_ms: Floats
    comm_ms: Floats

    @classmethod
    def of(cls, spans: Sequence[Span]) -> _Step:
        busy = [span for span in spans if span.tokens > 0]
        # A fast rank of a group waits in the all-to-alls for the slow ones: the least is what they
        # take.
        comm: dict[tuple[float, ...], float] = {}
        for s in busy:
            group = (s.micro_step, s.degree, s.tokens, s.squares, s.sequences)
            comm[group] = min(comm.get(group, np.inf), s.comm_ms)
        rows = [
            (
                *(s.rank, s.micro_step, s.degree, s.tokens, s.squares, s.sequences, s.compute_ms),
                comm[s.micro_step, s.degree, s.tokens, s.squares, s.sequences],
            )
            for s in busy
        ]
        columns = np.array(rows, dtype=np.float64).reshape(len(rows), 8).T
        return cls(*(c.astype(np.intp) for c in columns[:3]), *columns[3:])

    def work_ms(self, cost: CostModel, speeds: Floats) -> float:
        """What its slowest groups were to take, without the fixed cost of micro-steps."""
        if not len(self.rank):
            return 0.0
        times = (self.design @ _compute_of(cost) + self.exchange_ms(cost)) / speeds[self.rank]
        slowest = np.zeros(self.micro_step.max() + 1)
        np.maximum.at(slowest, self.micro_step, times)
        return float(slowest.sum())

    @property
    def design(self) -> Floats:
        """What multiplies quadratic, linear and per_sequence, (spans, 3)."""
        return np.stack(
            [self.squares / self.degree, self.tokens / self.degree, self.sequences], axis=1
        )

    def exchange_ms(self, cost: CostModel) -> Floats:
        """Predicted comm_ms, (spans,)."""
        slowness = np.array([1 / cost.bandwidth_at(d) if d > 1 else 0.0 for d in self.degree])
        moved = cost.exchange_mb_per_token * self.tokens / self.degree
        fixed = np.where(self.degree > 1, cost.exchange_ms, 0.0)
        return np.asarray(moved * slowness + fixed)


@dataclass
class _Observed:
    """A step in the window, and how fast the ranks were then, (ranks,)."""

    step: _Step
    measured_ms: float
    is_usual: bool
    speeds: Floats
    peaks: Floats  # (ranks that told one, 2)


class Calibrator:
    """A cost model, and how fast each rank is, that follow the last steps.

    Attributes:
        cost: the present model.
        step_ms: what a step takes beside its micro-steps, whatever its plan (the optimizer).
        speeds: of each rank, 1 as the model says, 0.5 half as fast.
        version: how many fits have changed either.
        errors: relative standard error of the coefficients that the data decide, by name.
    """

    def __init__(
        self,
        cost: CostModel,
        ranks: Sequence[Hashable],
        *,
        window: int = WINDOW,
        half_life: float = HALF_LIFE,
        least_tokens: int = 1,
    ) -> None:
        """`ranks`: what they are known by in another membership (`on`).

        `window`: steps that are kept. `half_life`: steps after which one counts half.
        `least_tokens`: a GPU has room for these, whatever peaks of memory say.
        """
        self.cost, self.speeds = cost, (1.0,) * len(ranks)
        self.step_ms = 0.0
        self._window, self._half_life, self._least_tokens = window, half_life, least_tokens
        self._ranks = tuple(ranks)
        self.version = 0
        self.errors: dict[str, float] = {}
        self._steps: deque[_Observed] = deque(maxlen=window)
        self._unseen = 0  # steps since the last fit

    def on(
        self, cost: CostModel, ranks: Sequence[Hashable], *, least_tokens: int = 1
    ) -> Calibrator:
        """One for another membership, with the speeds of those that stay.

        What a token takes of a GPU's memory is the same there.
        """
        learned = self.cost.buffers_mb, self.cost.mb_per_token
        cost = with_memory(cost, *learned, len(ranks), least_tokens)
        other = Calibrator(
            cost,
            ranks,
            window=self._window,
            half_life=self._half_life,
            least_tokens=least_tokens,
        )
        known = dict(zip(self._ranks, self.speeds, strict=True))
        other.speeds = tuple(known.get(rank, 1.0) for rank in ranks)
        other.step_ms, other.version = self.step_ms, self.version + 1
        return other

    def observe(self, step: StepSpans) -> None:
        """Adds the newest step; the oldest leaves the window."""
        speeds, spans = np.array(self.speeds), _Step.of(step.spans)
        peaks = np.array(step.peaks, dtype=np.float64).reshape(-1, 2)
        self._steps.append(_Observed(spans, step.measured_ms, step.is_usual, speeds, peaks))
        self._unseen += 1

    def fit(self) -> None:
        """Fits the window; nothing changes while there is nothing new to fit."""
        if not self._unseen:
            return
        before = (self.cost, self.speeds)
        spans, weight = self._together()
        cost = self.cost
        if len(spans.rank):
            cost = self._fit_compute(cost, spans, weight)
            if len(self._steps) >= SOONEST and self._notice(cost, spans, weight):
                cost = self._fit_compute(cost, spans, weight)
            cost = self._fit_exchange(cost, spans, weight)
        cost, self.step_ms = self._fit_fixed(cost)
        peaks = np.concatenate([observed.peaks for observed in self._steps])
        self.cost = with_peaks(cost, peaks, len(self._ranks), self._least_tokens)
        self._unseen = 0
        self.version += (self.cost, self.speeds) != before

    def _notice(self, cost: CostModel, spans: _Step, weight: Floats) -> bool:
        """Whether a rank has another speed than it was known to have."""
        known = np.array(self.speeds)
        speeds = _speeds(cost, spans, weight**2, known)  # of fewer steps than the model
        if (speeds == known).all():
            return False
        self.speeds = tuple(speeds.tolist())
        for observed in list(self._steps)[-max(SOONEST, self._unseen) :]:
            observed.speeds = speeds  # it has had it for some steps
        return True

    def _together(self) -> tuple[_Step, Floats]:
        """All spans of the window, and how much each counts."""
        steps = [observed.step for observed in self._steps]
        spans = _Step(*(np.concatenate(parts) for parts in zip(*map(_fields, steps), strict=True)))
        ages = np.repeat(np.arange(len(steps))[::-1], [len(step.rank) for step in steps])
        return spans, 0.5 ** (ages / self._half_life)

    def _fit_compute(self, cost: CostModel, spans: _Step, weight: Floats) -> CostModel:
        seen = spans.compute_ms > 0
        if not seen.any():
            return cost
        speed = np.concatenate([o.speeds[o.step.rank] for o in self._steps])
        measured = (spans.compute_ms * speed)[seen]
        fitted, errors = _fit(spans.design[seen], measured, _compute_of(cost), weight[seen])
        self.errors |= dict(zip(("quadratic", "linear", "per_sequence"), errors, strict=True))
        quadratic, linear, per_sequence = fitted
        return replace(cost, quadratic=quadratic, linear=linear, per_sequence=per_sequence)

    def _fit_exchange(self, cost: CostModel, spans: _Step, weight: Floats) -> CostModel:
        used = (spans.degree > 1) & (spans.comm_ms > 0)
        if not used.any() or cost.exchange_mb_per_token == 0:
            return cost
        degree, comm_ms = spans.degree[used], spans.comm_ms[used]
        seen = sorted(set(degree.tolist()))
        listed = sorted({*seen, *(d for d, _ in cost.bandwidth)})
        design = np.zeros((len(degree), len(seen) + 1))
        moved = cost.exchange_mb_per_token * spans.tokens[used] / degree
        design[np.arange(len(degree)), np.searchsorted(seen, degree)] = moved
        design[:, -1] = 1.0
        prior = np.array([*(1 / cost.bandwidth_at(d) for d in seen), cost.exchange_ms])
        fitted, errors = _fit(design, comm_ms, prior, weight[used])
        *slowness, exchange_ms = fitted
        names = (*(f"bandwidth {d}" for d in seen), "exchange_ms")
        self.errors |= dict(zip(names, errors, strict=True))
        # Degrees that no group had keep their relation to those that some group had.
        scale = float(np.median(np.array(slowness) / np.maximum(prior[:-1], 1e-12)))
        now = dict(zip(seen, slowness, strict=True))
        bandwidth = tuple(
            (d, 1 / max(now[d] if d in now else scale / cost.bandwidth_at(d), 1e-9)) for d in listed
        )
        return replace(cost, bandwidth=bandwidth, exchange_ms=exchange_ms)

    def _fit_fixed(self, cost: CostModel) -> tuple[CostModel, float]:
        """What steps take beside the planned work: so it holds what stragglers cost, too."""
        newest_first = enumerate(reversed(self._steps))
        told = [
            (o.step.micro_step.max() + 1, o.step.work_ms(cost, o.speeds), o.measured_ms, age)
            for age, o in newest_first
            if o.is_usual and len(o.step.rank)
        ]
        if not told:
            return cost, self.step_ms
        micro_steps, work, measured, age = np.array(told).T
        design = np.stack([micro_steps, np.ones(len(told))], axis=1)
        prior = np.array([cost.micro_step_ms, self.step_ms])
        weight = 0.5 ** (age / self._half_life)
        (micro_step_ms, step_ms), errors = _fit(design, measured - work, prior, weight, measured)
        self.errors |= dict(zip(("micro_step_ms", "step_ms"), errors, strict=True))
        return replace(cost, micro_step_ms=micro_step_ms), step_ms


def _fields(step: _Step) -> tuple[Floats, ...]:
    return tuple(getattr(step, name) for name in _Step.__dataclass_fields__)


def _compute_of(cost: CostModel) -> Floats:
    return np.array([cost.quadratic, cost.linear, cost.per_sequence])


def _speeds(cost: CostModel, spans: _Step, weight: Floats, known: Floats) -> Floats:
    """How fast each rank is against what the model says, (ranks,)."""
    predicted = spans.design @ _compute_of(cost)
    seen = (spans.compute_ms > 0) & (predicted > 0)
    found, rank = known.copy(), spans.rank[seen]
    ranks, spans_of = np.unique(rank, return_counts=True)
    # By time: a short span says little.
    told = _medians(predicted[seen] / spans.compute_ms[seen], (weight * predicted)[seen], rank)
    is_enough = spans_of >= SOONEST
    found[ranks[is_enough]] = told[is_enough]
    found = found / np.quantile(found, 0.5, method="higher")
    found[np.abs(found - 1) < NOTICED] = 1.0
    near = np.abs(found / known - 1) < NOTICED
    return np.where(near & ((found == 1) == (known == 1)), known, found)


def _fit(
    design: Floats, measured: Floats, prior: Floats, weight: Floats, scale: Floats | None = None
) -> tuple[list[float], list[float]]:
    """Non-negative coefficients for `design` (n, c) @ coefficients = `measured` (n,).

    Residuals are relative to `scale` (n,), by default to what was measured (spans range over orders
    of magnitude), weighted by `weight` (n,) and by Huber's rule so that a stalled rank does not
    count. Returns coefficients and their relative standard errors.
    """
    scale = measured if scale is None else scale
    predicted = design @ prior
    ratio = _median(measured / np.maximum(predicted, 1e-12), weight) if predicted.any() else 1.0
    shaped = prior * max(ratio, 1e-3)
    # One that is nothing now can still appear: its unit is a hundredth of a typical span.
    typical = max(_median(measured, weight), 1e-3 * _median(scale, weight))
    scaled = np.maximum(shaped, 0.01 * typical / np.maximum(design.mean(axis=0), 1e-12))
    target = shaped / scaled

    a, b = design * scaled / scale[:, None], measured / scale
    huber = np.ones(len(measured))
    multiple = target
    for _ in range(ROUNDS):
        before = multiple
        share_of = weight * huber
        share_of = share_of / share_of.sum()
        # The normal equations: as small for the spans of a thousand ranks as for those of four.
        normal = a.T @ (share_of[:, None] * a)
        pull = PULL * np.trace(normal) / len(prior)
        normal += pull * np.eye(len(prior))
        lower = np.linalg.cholesky(normal)
        right = solve_triangular(lower, a.T @ (share_of * b) + pull * target, lower=True)
        multiple, _ = nnls(lower.T, right)
        residual = np.abs(a @ multiple - b)
        deviation = 1.4826 * _median(residual, weight) + 1e-9
        huber = np.minimum(1.0, HUBER * deviation / np.maximum(residual, 1e-12))
        if np.allclose(multiple, before, rtol=1e-4, atol=1e-6):
            break
    spread = deviation * np.sqrt(np.diag(np.linalg.inv(normal)) * (share_of**2).sum())
    errors = spread / np.maximum(multiple, 1e-12)
    return [float(c) for c in multiple * scaled], [float(e) for e in errors]


def _median(values: Floats, weight: Floats) -> float:
    """The weighted median."""
    return float(_medians(values, weight, np.zeros(len(values), dtype=np.intp))[0])


def _medians(values: Floats, weight: Floats, part: npt.NDArray[np.intp]) -> Floats:
    """The weighted median of each part, by ascending numbers of parts; all arrays are (n,)."""
    order = np.lexsort((values, part))
    first = np.flatnonzero(np.diff(part[order], prepend=-1))
    last = np.append(first[1:], len(order)) - 1
    total = np.cumsum(weight[order])
    before = np.append(0.0, total[last[:-1]])
    middle = np.searchsorted(total, 0.5 * (before + total[last]))
    return np.asarray(values[order][np.clip(middle, first, last)])
