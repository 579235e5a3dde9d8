"""Lower bounds: how good a plan could be at best."""

from __future__ import annotations

import numpy as np

from flexray.solver.problem import Problem


def cheap_bound(problem: Problem) -> float:
    """ms that no plan of the step is under, at once: work, memory and the longest sequence.

    The groups of a micro-step of time C hold at most C x (sum of speeds) of GPU work, so all
    micro-steps together last at least the least work of all sequences over that; and one of them
    holds the longest sequence. There are at least as many micro-steps as memory demands.
    """
    if not len(problem.lengths):
        return 0.0
    with np.errstate(invalid="ignore"):
        cheapest = problem.work.min(axis=1).sum() / problem.power
    longest = (problem.time + problem.fixed).min(axis=1).max() / max(problem.cluster.speed)
    return float(max(cheapest, longest) + problem.fewest_micro_steps * problem.micro_step_ms)
