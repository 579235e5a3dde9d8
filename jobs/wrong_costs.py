"""A cost model that is wrong, for runs that are to find the right one."""

from __future__ import annotations

from dataclasses import replace

from flexray.solver.cost import CostModel


def wrong(cost: CostModel, factor: float) -> CostModel:
    """Every coefficient of time off by a factor, one up and the next down."""
    return replace(
        cost,
        quadratic=cost.quadratic * factor,
        linear=cost.linear / factor,
        micro_step_ms=cost.micro_step_ms * factor,
        exchange_ms=cost.exchange_ms / factor,
        bandwidth=tuple(
            (d, speed * (factor if i % 2 else 1 / factor))
            for i, (d, speed) in enumerate(cost.bandwidth)
        ),
    )
