"""What becomes of a plan under another cost model than the one that it was made with."""

from __future__ import annotations

import math

from flexray.solver.assemble import group_ms
from flexray.solver.cluster import Cluster
from flexray.solver.cost import CostModel
from flexray.solver.plan import Plan


def fits(plan: Plan, cost: CostModel, cluster: Cluster) -> bool:
    """Whether its packs have room in the GPUs' memory."""
    tokens = cost.capacity(cluster.gpus)
    return all(g.tokens <= tokens * g.degree for m in plan.micro_steps for g in m.groups)


def predicted_ms(plan: Plan, cost: CostModel, cluster: Cluster) -> float:
    """Time of the step, whether or not memory still suffices for it.

    `cluster` has the ranks that the plan is for; their speeds may be other ones.
    """
    degrees = {g.degree for m in plan.micro_steps for g in m.groups}
    options = (
        {option.degree: option for option in cost.options(cluster, degrees)} if degrees else {}
    )
    speed = cluster.speed
    return math.fsum(
        cost.micro_step_ms
        + max(
            group_ms(options[g.degree], g.lengths) / min(speed[r] for r in g.ranks)
            for g in m.groups
        )
        for m in plan.micro_steps
    )
