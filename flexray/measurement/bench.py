"""Runs cases on the ranks of one generation, one after another."""

from __future__ import annotations

from collections.abc import Sequence

from flexray.actors.pool import Generation, Pool
from flexray.actors.work import EvaluationReport, StepReport, slices
from flexray.measurement.design import Case, Ranks
from flexray.solver.cluster import Cluster
from flexray.solver.communicators import CommunicatorCache
from flexray.solver.plan import Plan

_NOTHING = Plan((), 0.0, 0.0, solve_s=0.0, method="profile")
REPEATS = 3


class Bench:
    """One generation to measure on."""

    def __init__(self, pool: Pool, generation: Generation, communicators: int) -> None:
        """`communicators`: most that a rank holds at once."""
        self._pool, self._generation = pool, generation
        self._cache = CommunicatorCache(communicators)
        self._step = 0

    @property
    def cluster(self) -> Cluster:
        """The ranks and their nodes."""
        return self._generation.cluster

    def run(self, case: Case) -> list[StepReport]:
        """One whole training step; what each rank reports, in rank order. Raises Broken."""
        self._step += 1
        work = slices(
            case.plan,
            case.lengths,
            world=self._generation.world,
            step=self._step,
            generation=self._generation.number,
            label_tokens=case.label_tokens,
            changes=self._cache.prepare(_groups(case.plan)),
            snapshot=False,
        )
        return self._pool.wait(self._pool.dispatch(work), "step")

    def creation_ms(self, groups: Sequence[Ranks]) -> float:
        """What making the communicators of `groups`, side by side, takes with their first use."""
        without = min(self._make([]) for _ in range(REPEATS))
        return max(0.0, self._make(groups) - without)

    def _make(self, groups: Sequence[Ranks]) -> float:
        """Milliseconds of a step that only makes communicators."""
        work = slices(
            _NOTHING,
            (),
            world=self._generation.world,
            step=self._step,
            generation=self._generation.number,
            label_tokens=0,
            changes=self._cache.prepare(groups),
        )
        reports: list[EvaluationReport] = self._pool.wait(self._pool.evaluate(work), "evaluation")
        return max(report.wall_ms for report in reports)


def _groups(plan: Plan) -> list[Ranks]:
    return [group.ranks for micro_step in plan.micro_steps for group in micro_step.groups]
