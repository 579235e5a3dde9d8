"""Planner and calibrator together, on simulated clusters whose coefficients nobody tells them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from flexray.jobs.wrong_costs import wrong
from flexray.presets import load_preset
from flexray.solver.calibration import Calibrator, Span, StepSpans
from flexray.solver.cluster import Cluster
from flexray.solver.cost import CostModel
from flexray.solver.memory import Peak
from flexray.solver.plan import Plan
from flexray.solver.planner import Effort, plan_step
from flexray.solver.prediction import predicted_ms

GPUS, SEQUENCES = 16, 96
CLUSTER = Cluster.uniform(GPUS)
DEGREES = (1, 2, 4, 8, 16)
TRUE = load_preset("gpt-7b-a100-40g").with_max_length(48_000).cost
TRUE = TRUE.with_capacity(TRUE.capacity(64))
FOLDER = Path(__file__).parents[2] / "datasets" / "lengths"


def batches(data: str, n: int) -> list[list[int]]:
    lengths = pq.read_table(FOLDER / f"{data}.parquet")["length"].to_numpy()
    kept = lengths[lengths <= 48_000]
    return [kept[i * SEQUENCES : (i + 1) * SEQUENCES].tolist() for i in range(n)]


@dataclass
class Machine:
    """Ranks that take what `cost` says, times noise, a rank's own slowness, and some hiccups."""

    cost: CostModel
    noise: float = 0.05
    hiccups: float = 0.0  # share of spans that take ten times as long
    slowness: tuple[float, ...] = (1.0,) * GPUS
    seed: int = 0
    token_mb: float = 0.0  # of a GPU's memory, beside 1,000 MB

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)

    def run(self, plan: Plan) -> StepSpans:
        spans, measured = [], 0.0
        held: dict[int, int] = {}
        for m, micro_step in enumerate(plan.micro_steps):
            slowest = 0.0
            for group in micro_step.groups:
                d, tokens = group.degree, group.tokens
                squares = sum(float(n) ** 2 for n in group.lengths)
                compute = (self.cost.quadratic * squares + self.cost.linear * tokens) / d
                compute += self.cost.per_sequence * len(group.rows)
                comm = 0.0
                if d > 1:
                    moved = self.cost.exchange_mb_per_token * tokens / d
                    comm = moved / self.cost.bandwidth_at(d) + self.cost.exchange_ms
                for rank in group.ranks:
                    held[rank] = max(held.get(rank, 0), -(-tokens // d))
                    own = compute * self.slowness[rank] * self.random.lognormal(0, self.noise)
                    if self.random.random() < self.hiccups:
                        own *= 10
                    took = comm * self.random.lognormal(0, self.noise)
                    spans.append(Span(rank, m, d, tokens, squares, len(group.rows), own, took))
                    slowest = max(slowest, own + took)
            measured += slowest + self.cost.micro_step_ms
        peaks = tuple(Peak(n, 1000.0 + self.token_mb * n) for n in held.values() if self.token_mb)
        return StepSpans(tuple(spans), measured, peaks=peaks)


def train(
    machine: Machine, start: CostModel, data: list[list[int]], calibrator: Calibrator | None = None
) -> tuple[list[tuple[float, float]], Calibrator]:
    """(predicted ms, measured ms) of every step, planned with what was learned until then."""
    calibrator = calibrator or Calibrator(start, range(GPUS))
    told = []
    for lengths in data:
        calibrator.fit()
        cluster = replace(CLUSTER, speeds=calibrator.speeds)
        plan = plan_step(lengths, calibrator.cost, cluster, DEGREES, effort=Effort(nodes=0))
        assert predicted_ms(plan, calibrator.cost, cluster) == pytest.approx(plan.planned_ms)
        step = machine.run(plan)
        told.append((plan.planned_ms + calibrator.step_ms, step.measured_ms))
        calibrator.observe(step)
    return told, calibrator


def error(told: list[tuple[float, float]]) -> float:
    """Mean absolute error of predicted step times."""
    return float(np.mean([abs(predicted / measured - 1) for predicted, measured in told]))


@pytest.mark.parametrize("data", ["wikipedia", "github"])
@pytest.mark.parametrize("factor", [3.0, 1 / 3.0])
def test_from_coefficients_three_times_wrong_steps_are_predicted_within_twenty(
    data: str, factor: float
) -> None:
    told, _ = train(Machine(TRUE), wrong(TRUE, factor), batches(data, 32))
    assert error(told[:1]) > 0.2  # else there would be nothing to learn
    assert error(told[20:]) < 0.06


def test_hiccups_do_not_spoil_what_is_learned() -> None:
    _, calibrator = train(Machine(TRUE, hiccups=0.02), wrong(TRUE, 3.0), batches("github", 30))
    assert calibrator.cost.quadratic == pytest.approx(TRUE.quadratic, rel=0.05)
    assert calibrator.cost.linear == pytest.approx(TRUE.linear, rel=0.05)
    assert calibrator.speeds == (1.0,) * GPUS


def test_a_slow_rank_gets_less_work_within_ten_steps() -> None:
    slowness = (1.0,) * 5 + (2.0,) + (1.0,) * (GPUS - 6)
    data = batches("github", 24)
    _, calibrator = train(Machine(TRUE, slowness=slowness), TRUE, data[:10])
    assert calibrator.speeds[5] == pytest.approx(0.5, rel=0.1)
    assert [s for r, s in enumerate(calibrator.speeds) if r != 5] == [1.0] * (GPUS - 1)
    quiet = Machine(TRUE, noise=0.0, slowness=slowness)
    aware, _ = train(quiet, TRUE, data[10:], calibrator)
    unaware = [
        quiet.run(plan_step(lengths, TRUE, CLUSTER, DEGREES, effort=Effort(nodes=0))).measured_ms
        for lengths in data[10:]
    ]
    healthy = [
        plan_step(lengths, TRUE, CLUSTER, DEGREES, effort=Effort(nodes=0)).planned_ms
        for lengths in data[10:]
    ]
    took = sum(measured for _, measured in aware)
    # As fast as the ranks' speeds in all allow, to 15%, and not at the slow one's pace.
    assert took < 1.15 * sum(healthy) * GPUS / (GPUS - 0.5)
    assert took < 0.75 * sum(unaware)
    assert error(aware) < 0.10


@pytest.mark.parametrize("estimated", [0.4, 1.6])
def test_plans_use_the_memory_that_there_is(estimated: float) -> None:
    usable, token_mb = 5000.0, 1.0  # so a GPU has room for 4,000 tokens
    start = replace(TRUE, tokens_per_gpu=None, state_mb=0.0, communicator_mb=0.0)
    start = replace(start, usable_mb=usable, mb_per_token=token_mb * estimated)
    calibrator = Calibrator(start, range(GPUS), least_tokens=48_000 // GPUS)
    data = batches("github", 12)
    machine = Machine(TRUE, token_mb=token_mb)
    train(machine, start, data[:8], calibrator)
    calibrator.fit()
    assert 0.98 * 4000 < calibrator.cost.capacity(GPUS) <= 4001
    for lengths in data[8:]:
        plan = plan_step(lengths, calibrator.cost, CLUSTER, DEGREES, effort=Effort(nodes=0))
        assert max(peak.mb for peak in machine.run(plan).peaks) <= usable


@pytest.mark.parametrize(("between_nodes", "spans"), [(0.3, False), (30.0, True)])
def test_groups_span_nodes_only_where_the_measured_bandwidth_says_that_it_pays(
    between_nodes: float, spans: bool
) -> None:
    inside = ((2, 50.0), (4, 50.0), (8, 50.0))
    told_wrong = 3.0 if spans else 10.0  # the other way round
    true = replace(TRUE, bandwidth=(*inside, (16, between_nodes)))
    start = replace(TRUE, bandwidth=(*inside, (16, told_wrong)))
    true, start = true.with_capacity(48_000 // 8), start.with_capacity(48_000 // 8)
    calibrator = Calibrator(start, range(GPUS))
    probe = plan_step([16_000], start, CLUSTER, (16,), effort=Effort(nodes=0))
    rest = plan_step([40_000], start, CLUSTER, (8,), effort=Effort(nodes=0))
    machine = Machine(true)
    for _ in range(4):
        calibrator.observe(machine.run(probe))
        calibrator.observe(machine.run(rest))
    calibrator.fit()
    assert calibrator.cost.bandwidth_at(16) == pytest.approx(between_nodes, rel=0.15)
    plan = plan_step([40_000], calibrator.cost, CLUSTER, DEGREES, effort=Effort(nodes=0))
    (group,) = (g for m in plan.micro_steps for g in m.groups)
    assert (group.degree == 16) is spans
    assert len({CLUSTER.node_of[rank] for rank in group.ranks}) == 1 + spans
