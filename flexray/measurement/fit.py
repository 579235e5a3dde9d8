"""From measured steps to a cost model, and whether it is one to plan with."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from flexray.solver.calibration import Calibrator, Span, StepSpans
from flexray.solver.cluster import Cluster
from flexray.solver.cost import CostModel
from flexray.solver.plan import Plan
from flexray.solver.prediction import predicted_ms

# A fit is refused where the median prediction is off by more than this share of what was measured,
WORST = 0.30
# or where a term is known so badly that it alone moves a prediction by this share.
UNSURE = 0.25
# MB per ms: ten times what NVLink has. A fit goes beyond when more tokens took no longer.
NO_LIMIT = 1e4


class BadFit(RuntimeError):
    """The measurements do not make a cost model: one line that says why."""


@dataclass(frozen=True)
class Observed:
    """A step that was run, some times over: the medians of what it took."""

    plan: Plan
    spans: StepSpans

    @classmethod
    def of(cls, plan: Plan, runs: Sequence[StepSpans]) -> Observed:
        """`runs`: of the same step, after its first one, which made communicators."""
        spans = [
            replace(
                same[0],
                compute_ms=median(s.compute_ms for s in same),
                comm_ms=median(s.comm_ms for s in same),
            )
            for same in zip(*(_without_waits(run.spans) for run in runs), strict=True)
        ]
        return cls(plan, StepSpans(tuple(spans), median(run.measured_ms for run in runs)))


def _without_waits(spans: Sequence[Span]) -> list[Span]:
    """As the Calibrator: who comes first to an all-to-all waits for the others, the last does not.

    It is another rank in every run, so that this comes before any median.
    """
    least: dict[tuple[float, ...], float] = {}
    for s in spans:
        least[_group(s)] = min(least.get(_group(s), math.inf), s.comm_ms)
    return [replace(s, comm_ms=least[_group(s)]) for s in spans]


def _group(span: Span) -> tuple[float, ...]:
    return span.micro_step, span.degree, span.tokens, span.squares


@dataclass(frozen=True)
class Point:
    """One prediction, and what was measured.

    Attributes:
        kind: "compute", "all-to-all" or "step".
        degree: of the group; of a step the largest.
        parts: ms that each coefficient contributes, by name.
    """

    kind: str
    degree: int
    measured_ms: float
    parts: dict[str, float]

    @property
    def predicted_ms(self) -> float:
        """By the fitted model."""
        return math.fsum(self.parts.values())

    @property
    def error(self) -> float:
        """Off by this share of what was measured."""
        return abs(self.predicted_ms - self.measured_ms) / self.measured_ms


@dataclass(frozen=True)
class Fit:
    """A cost model, and all that it is held against.

    Attributes:
        step_ms: of a step, whatever its plan.
        speeds: of each rank, 1 as the model says.
        errors: relative standard errors of coefficients, by the Calibrator's names.
    """

    cost: CostModel
    step_ms: float
    speeds: tuple[float, ...]
    errors: dict[str, float]
    points: tuple[Point, ...]

    def by_kind(self) -> dict[str, list[Point]]:
        """Points of each kind, those of the all-to-all by degree."""
        kinds: dict[str, list[Point]] = defaultdict(list)
        for point in sorted(self.points, key=lambda p: (_KINDS.index(p.kind), p.degree)):
            is_exchange = point.kind == "all-to-all"
            kinds[f"{point.kind}, degree {point.degree}" if is_exchange else point.kind].append(
                point
            )
        return dict(kinds)

    def check(self) -> None:
        """Raises BadFit."""
        for kind, points in self.by_kind().items():
            if (middle := median(p.error for p in points)) > WORST:
                raise BadFit(
                    f"{kind}: half of {len(points)} predictions are off by {middle:.0%} or more "
                    f"(at most {WORST:.0%} is a fit): is something else running on these machines?"
                )
        for degree, speed in self.cost.bandwidth:
            if f"bandwidth {degree}" in self.errors and speed > NO_LIMIT:
                raise BadFit(
                    f"bandwidth {degree}: its all-to-alls took no longer with more tokens: is "
                    "something else running on these machines?"
                )
        for name, error in self.errors.items():
            shares = [p.parts.get(name, 0.0) / p.measured_ms for p in self.points]
            moved = error * max(shares)
            if moved > UNSURE:
                raise BadFit(
                    f"{name}: the measured steps do not tell it: its standard error ({error:.0%}) "
                    f"alone moves predictions by up to {moved:.0%} (at most {UNSURE:.0%} is a fit)"
                )


_KINDS = ("compute", "all-to-all", "step")


def fit(cost: CostModel, cluster: Cluster, observed: Sequence[Observed]) -> Fit:
    """The Calibrator's fit, all steps counting alike. `cost` is where it starts."""
    calibrator = Calibrator(cost, range(cluster.gpus), window=len(observed), half_life=math.inf)
    for step in observed:
        calibrator.observe(step.spans)
    calibrator.fit()
    cost, speeds, step_ms = calibrator.cost, calibrator.speeds, calibrator.step_ms
    there = Cluster(cluster.node_sizes, speeds)
    points = [point for step in observed for point in _points(step, cost, there, step_ms)]
    return Fit(cost, step_ms, speeds, calibrator.errors, tuple(points))


def _points(step: Observed, cost: CostModel, cluster: Cluster, step_ms: float) -> Iterator[Point]:
    exchanges: dict[tuple[float, ...], Span] = {}  # one of each group: its spans are alike
    for s in step.spans.spans:
        if s.tokens == 0:
            continue
        parts = {
            "quadratic": cost.quadratic * s.squares / s.degree,
            "linear": cost.linear * s.tokens / s.degree,
            "per_sequence": cost.per_sequence * s.sequences,
        }
        speed = cluster.speed[s.rank]
        parts = {name: ms / speed for name, ms in parts.items()}
        yield Point("compute", s.degree, s.compute_ms, parts)
        if s.degree > 1:
            exchanges[_group(s)] = s
    for s in exchanges.values():
        moved = cost.exchange_mb_per_token * s.tokens / s.degree
        parts = {
            f"bandwidth {s.degree}": moved / cost.bandwidth_at(s.degree),
            "exchange_ms": cost.exchange_ms,
        }
        yield Point("all-to-all", s.degree, s.comm_ms, parts)
    micro_steps = cost.micro_step_ms * len(step.plan.micro_steps)
    work = predicted_ms(step.plan, cost, cluster) - micro_steps
    largest = max(max(degrees) for degrees in step.plan.degrees)
    parts = {"work": work, "micro_step_ms": micro_steps, "step_ms": step_ms}
    yield Point("step", largest, step.spans.measured_ms, parts)
