"""What a planner would gain on a cluster, on paper: the same batches under every strategy.

Every plan is checked by `flexray.solver.verify`; every time is that of the cost model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from flexray.solver.assemble import group_ms
from flexray.solver.baselines import batch_adaptive, karmarkar_karp, megatron_greedy, static
from flexray.solver.cluster import Cluster
from flexray.solver.cost import CostModel
from flexray.solver.flexsp import flexsp
from flexray.solver.plan import Plan, PlanningError
from flexray.solver.planner import Effort, plan_step
from flexray.solver.verify import verify


@dataclass(frozen=True)
class Case:
    """One batch on one cluster.

    Attributes:
        batch: its number, counted from 0 in the input.
        lengths: tokens of each row, (rows,).
        longest: tokens of the longest row of all batches of the simulation.
    """

    batch: int
    lengths: tuple[int, ...]
    longest: int
    cost: CostModel
    cluster: Cluster
    degrees: tuple[int, ...]

    @property
    def problem(self) -> tuple[tuple[int, ...], CostModel, Cluster, tuple[int, ...]]:
        """The arguments that every planner takes."""
        return self.lengths, self.cost, self.cluster, self.degrees


# The guard on time is far off: a slow or busy machine gets the same plans.
_EFFORT = replace(Effort(), guard_s=600.0)

STRATEGIES: dict[str, Callable[[Case], Plan]] = {
    "static": lambda case: static(*case.problem, case.longest),
    "batch-adaptive": lambda case: batch_adaptive(*case.problem),
    "megatron": lambda case: megatron_greedy(*case.problem),
    "karmarkar-karp": lambda case: karmarkar_karp(*case.problem),
    "flexsp": lambda case: flexsp(*case.problem),
    "flexray": lambda case: plan_step(*case.problem, effort=_EFFORT),
}
# What the others are compared with.
BASELINE = "static"
# Takes minutes a batch, and its plans depend on the machine's speed.
SLOW = "flexsp"


@dataclass(frozen=True)
class StepResult:
    """One batch under one strategy: a line of steps.jsonl.

    The shares are of all GPUs' time in the step; what is left is compute.

    Attributes:
        gpus: size of the cluster.
        planned_ms: time of the step.
        lower_bound_ms: no plan of this batch is shorter.
        idle: share without work, while slower groups of the micro-step go on.
        exchange: share in all-to-alls.
        collectives: share in the parameter collectives of the micro-steps.
        solve_s: wall time of the planner.
        groups: degrees of each micro-step.
        row_degrees: degree of the group of each row, 0 for rows of length 0, (rows,).
    """

    gpus: int
    strategy: str
    batch: int
    planned_ms: float
    lower_bound_ms: float
    idle: float
    exchange: float
    collectives: float
    solve_s: float
    groups: list[list[int]]
    row_degrees: list[int]

    @property
    def key(self) -> tuple[int, str, int]:
        """What is simulated once: cluster size, strategy, batch."""
        return self.gpus, self.strategy, self.batch

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return asdict(self)


def simulate_step(strategy: str, case: Case) -> StepResult:
    """Plans a batch by a strategy, checks the plan, and says where the GPUs' time goes.

    Raises:
        PlanningError: the batch cannot be planned, or the strategy gave a wrong plan.
    """
    began = time.perf_counter()
    try:
        plan = STRATEGIES[strategy](case)
    except PlanningError as error:
        raise PlanningError(f"{strategy}, batch {case.batch}: {error}") from None
    solve_s = time.perf_counter() - began
    verify(plan, *case.problem)

    gpus = case.cluster.gpus
    total = plan.planned_ms * gpus
    collectives = len(plan.micro_steps) * case.cost.micro_step_ms * gpus
    groups = [group for step in plan.micro_steps for group in step.groups]
    busy = sum(group.degree * group.planned_ms for group in groups)
    # The same groups where all-to-alls cost nothing.
    silent = replace(case.cost, exchange_mb_per_token=0.0, exchange_ms=0.0)
    options = {option.degree: option for option in silent.options(case.cluster, case.degrees)}
    compute = sum(g.degree * group_ms(options[g.degree], g.lengths) for g in groups)
    row_degrees = [0] * len(case.lengths)
    for group in groups:
        for row in group.rows:
            row_degrees[row] = group.degree
    return StepResult(
        gpus=gpus,
        strategy=strategy,
        batch=case.batch,
        planned_ms=plan.planned_ms,
        lower_bound_ms=plan.lower_bound_ms,
        idle=(total - collectives - busy) / total if total else 0.0,
        exchange=(busy - compute) / total if total else 0.0,
        collectives=collectives / total if total else 0.0,
        solve_s=solve_s,
        groups=plan.degrees,
        row_degrees=row_degrees,
    )


def holds(cost: CostModel, cluster: Cluster, degrees: Iterable[int], tokens: int) -> bool:
    """Whether some group of the cluster holds a row of so many tokens."""
    try:
        return max(option.capacity for option in cost.options(cluster, degrees)) >= tokens
    except PlanningError:
        return False
