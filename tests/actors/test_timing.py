"""Own work, exchange and waiting are told apart."""

from __future__ import annotations

import time

import pytest

from flexray.actors.timing import Stopwatch
from flexray.solver.communicators import CommunicatorCache
from tests.actors.models import config, engine, label_tokens, sequences, work_of
from tests.worlds import run_world

LONG, SHORT = 1000, 20


def reports(rank, world, store, hf_config, plan, lengths, settings):
    """This rank's micro-step reports of five steps, warmed up."""
    batch = sequences(lengths)
    ours = engine(rank, world, store, batch, hf_config, **settings)
    communicators = CommunicatorCache(4)
    steps = [
        ours.run_step(work_of(rank, plan, label_tokens(batch), communicators, step=step))
        for step in range(1, 7)
    ]
    return steps[1:]


def least(steps, micro_step, name):
    """The least of a time over the steps: what is left when nobody else used the processor."""
    return min(getattr(step.micro_steps[micro_step], name) for step in steps)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_rank_that_waits_for_a_slower_one_does_not_call_it_work(checkpointing):
    plan = [[((0,), (0,)), ((1,), (1,))], [((0, 1), (2,))]]
    slow, fast = run_world(
        2,
        reports,
        config(),
        plan,
        (LONG, SHORT, 600),
        {"activation_checkpointing": checkpointing},
    )
    for step in (*slow, *fast):
        for part in step.micro_steps:
            own, exchange, wait = part.own_work_ms, part.all_to_all_ms, part.wait_ms
            assert own > 0
            assert exchange >= 0
            assert wait >= 0, part  # so own work and exchange are within forward and backward
            assert own + exchange + wait == pytest.approx(part.forward_ms + part.backward_ms)
        alone, together = step.micro_steps
        assert alone.all_to_all_ms == 0 < together.all_to_all_ms
        assert (alone.degree, together.degree, together.tokens) == (1, 2, 600)
        assert together.squares == 600**2
        assert step.step_ms > sum(p.forward_ms + p.backward_ms for p in step.micro_steps)
        assert step.idle_ms >= 0
        assert step.peak_memory_mb > 50
    assert (slow[0].micro_steps[0].tokens, fast[0].micro_steps[0].tokens) == (LONG, SHORT)
    # Both micro-steps last as long as the slow rank's; only the work tells the two apart.
    long, short = (least(steps, 0, "own_work_ms") for steps in (slow, fast))
    assert long > 3 * short
    assert least(fast, 0, "wait_ms") > 2 * short
    whole = min(s.micro_steps[0].forward_ms + s.micro_steps[0].backward_ms for s in slow)
    assert long > 0.4 * whole


def test_a_stopwatch_adds_up_spans_and_forgets_them_when_read():
    watch = Stopwatch()
    for _ in range(2):
        with watch.span("nap"):
            time.sleep(0.01)
    watch.start("open")
    watch.stop("never opened")
    assert 20 <= watch.read()["nap"] < 200
    watch.stop("open")
    assert watch.read() == {}
