"""Which sequence-parallel degrees a model and a cluster allow."""

from __future__ import annotations

from flexray.solver.plan import PlanningError


def legal_degrees(heads: int, kv_heads: int, gpus: int) -> tuple[int, ...]:
    """Ulysses degrees, ascending; not only powers of two.

    A degree d divides the query heads, so that each rank gets whole heads, and d divides the
    key/value heads or they divide d (then each is replicated on d / kv_heads ranks).

    Raises:
        PlanningError: a count below 1, or query heads that key/value heads don't divide.
    """
    for name, value in (("heads", heads), ("kv_heads", kv_heads), ("gpus", gpus)):
        if value < 1:
            raise PlanningError(f"{name} must be at least 1: it is {value}")
    if heads % kv_heads:
        raise PlanningError(f"{heads} query heads are no multiple of {kv_heads} key/value heads")
    return tuple(
        d
        for d in range(1, min(heads, gpus) + 1)
        if heads % d == 0 and (kv_heads % d == 0 or d % kv_heads == 0)
    )


def powers_of_two(gpus: int) -> tuple[int, ...]:
    """1, 2, 4, ... up to `gpus`: the degrees of a planner that knows no model."""
    return tuple(2**i for i in range(gpus.bit_length()))
