"""Measures on the cluster of a config: one generation of its actors, random rows, planned steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from flexray.actors.membership import Membership
from flexray.actors.pool import Pool
from flexray.actors.seat import Initial
from flexray.actors.worker import Place
from flexray.datasets.random_rows import RandomRows
from flexray.errors import UserError
from flexray.measurement.bench import Bench
from flexray.measurement.design import across_round, inside, one_round, ramp
from flexray.measurement.fit import Observed
from flexray.model_preparation import ModelJob
from flexray.ray_cluster import Resources, connected
from flexray.records import step_spans
from flexray.solver.calibration import StepSpans
from flexray.solver.cluster import Cluster
from flexray.solver.cost import CostModel
from flexray.solver.memory import Peak

ROUNDS = 8
FEWEST_ROUNDS = 2
BUDGET_S = 45.0  # after which no further round begins
# The largest pack is the first on which a rank works so long: longer ones tell no more.
LONG_ENOUGH_MS = 200.0


@dataclass(frozen=True)
class Measurements:
    """What came back.

    Attributes:
        cost: the estimate to start from.
        tokens: on a rank at most.
        observed: measured steps. across: those of groups that span nodes without need.
        creation_ms: of a communicator with its first use, by degree.
        peaks: memory of the fullest rank over tokens, ascending.
    """

    places: tuple[Place, ...]
    cluster: Cluster
    device: str
    degrees: tuple[int, ...]
    cost: CostModel
    tokens: int
    observed: tuple[Observed, ...]
    across: tuple[Observed, ...]
    creation_ms: dict[int, float]
    peaks: tuple[Peak, ...]

    @property
    def where(self) -> str:
        """On what it was measured."""
        nodes = len(self.cluster.node_sizes)
        what = self.places[0].device_name or "CPUs"
        return f"{len(self.places)} ranks on {what}, {nodes} node{'s'[: nodes > 1]}"

    @property
    def degrees_across(self) -> tuple[int, ...]:
        """Degrees that a node has room for and that were measured across nodes too."""
        spanned = {g.degree for s in self.across for m in s.plan.micro_steps for g in m.groups}
        return tuple(sorted(spanned - {1}))


def measure(job: ModelJob, say: Callable[[str], None]) -> Measurements:
    """Starts the ranks, measures and ends them; `say` hears a line of what goes on.

    Raises UserError, PlanningError or ImpossibleRequest for what the user can put right, PoolError
    where a rank fails.
    """
    section = job.config.cluster
    with connected(section) as resources:
        job.check_device(resources.device)
        say("starting the ranks")
        with _pool(job, resources) as pool:
            pool.start()
            places = pool.candidates()
            if not places:
                raise UserError(
                    f"fewer than {pool.membership.least} ranks came: ask for fewer (cluster.gpus)"
                )
            cost, degrees = job.cost(places), job.degrees(len(places))
            generation = pool.form(1, Initial())
            bench = Bench(pool, generation, communicators=2 * len(degrees))
            return _measured(job, bench, resources.device, places, cost, degrees, say)


def _pool(job: ModelJob, resources: Resources) -> Pool:
    cluster = job.config.cluster
    least = resources.at_start or resources.target
    return Pool(
        Membership(resources.target, least, shard_size=cluster.shard_size),
        resources.device,
        job.settings,
        RandomRows(job.model.vocab_size),
        at_start=resources.at_start,
        silence_s=cluster.silence_s,
    )


def _measured(
    job: ModelJob,
    bench: Bench,
    device: str,
    places: tuple[Place, ...],
    cost: CostModel,
    degrees: tuple[int, ...],
    say: Callable[[str], None],
) -> Measurements:
    cluster = bench.cluster
    longest = job.longest
    # Memory is an estimate yet: half of what it says that a rank can hold.
    most = max(1, cost.capacity(cluster.gpus) // 2)
    say("more and more tokens on a rank")
    peaks, tokens = _ramp(bench, cluster, most, longest)
    say("communicators")
    creation_ms = {d: bench.creation_ms(inside(cluster, d)) for d in degrees if d > 1}
    longest = min(longest, tokens * degrees[-1])
    cases = one_round(cluster, degrees, tokens, longest)
    across = across_round(cluster, degrees, tokens, longest)
    for case in (*cases, *across):  # first use of kernels and communicators
        say("warming up")
        bench.run(case)
    began = time.monotonic()
    all_cases = (*cases, *across)
    runs: list[list[StepSpans]] = [[] for _ in all_cases]
    for number in range(ROUNDS):
        if number >= FEWEST_ROUNDS and time.monotonic() - began > BUDGET_S:
            break
        say(f"round {number + 1} of {ROUNDS}")
        for case, times in zip(all_cases, runs, strict=True):
            times.append(step_spans(bench.run(case)))
    observed = [Observed.of(c.plan, times) for c, times in zip(all_cases, runs, strict=True)]
    return Measurements(
        places=places,
        cluster=cluster,
        device=device,
        degrees=degrees,
        cost=cost,
        tokens=tokens,
        observed=tuple(observed[: len(cases)]),
        across=tuple(observed[len(cases) :]),
        creation_ms=creation_ms,
        peaks=peaks,
    )


def _ramp(bench: Bench, cluster: Cluster, most: int, longest: int) -> tuple[tuple[Peak, ...], int]:
    """Peaks of memory, and the tokens that a rank is given from here on."""
    peaks: list[Peak] = []
    for tokens, case in ramp(cluster, most, longest):
        bench.run(case)  # the first use makes what stays: kernels, optimizer states
        reports = bench.run(case)
        peaks.append(Peak(tokens, max(report.peak_memory_mb for report in reports)))
        # The fastest rank's: others may have been held up.
        if min(report.micro_steps[0].own_work_ms for report in reports) > LONG_ENOUGH_MS:
            break
    return tuple(peaks), peaks[-1].tokens
