import io
import os
import re
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from rich.console import Console

from flexray.display import Display, StepView
from flexray.events import StepEvent
from flexray.solver.plan import Group, MicroStep, Plan

VIEW = StepView(
    step=1,
    steps=30,
    loss=5.54321,
    tokens_per_s=12345.6,
    plan="4 | 2 1 1",
    planned_ms=1500.4,
    measured_ms=1602.6,
    speedup=1.234,
    plan_wait_ms=0.42,
)
# A step of 64 ranks in three micro-steps, as Plan.summary writes it.
LONG = " | ".join(["32 8 8 4 4 2 2 1x4"] * 3)


def shown(width, *views, message=None, **options):
    out = io.StringIO()
    console = Console(file=out, width=width, height=40, highlight=False, **options)
    with Display(console) as display:
        if message:
            display.message(message)
        for view in views:
            display.step(view)
    return out.getvalue()


def test_piped_is_one_plain_line_a_step():
    lines = shown(100, VIEW, replace(VIEW, step=12, plan=LONG)).splitlines()
    assert lines == [
        "step  1/30  loss 5.5432  12,346 tokens/s  1603 ms (planned 1500)  "
        "1.23x over one degree  plan wait 0.4 ms  plan 4 | 2 1 1",
        "step 12/30  loss 5.5432  12,346 tokens/s  1603 ms (planned 1500)  "
        f"1.23x over one degree  plan wait 0.4 ms  plan {LONG}",
    ]


def test_messages_are_printed_as_they_are():
    text = "4 ranks [bold]on[/bold] cpu: 3 rows [0, 1, 2] dropped " + "x" * 200
    assert shown(80, message=text) == text + "\n"


def test_a_step_without_labels_has_no_loss():
    assert "loss -  " in shown(100, replace(VIEW, loss=float("nan")))


def test_a_skipped_step_says_so():
    *_, line = shown(100, replace(VIEW, skipped=True)).splitlines()
    assert line == "step 1 skipped: its gradient is not finite, so nothing was changed"


def screen(text):
    """The last frame: what follows the last time the cursor went up and cleared."""
    frame = text.rsplit("\x1b[2K", 1)[-1]
    return [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).rstrip("\r") for line in frame.splitlines()]


@pytest.mark.parametrize("width", [80, 100, 160])
def test_a_terminal_shows_the_last_steps_each_on_one_line(width):
    views = [replace(VIEW, step=n, plan=LONG if n % 2 else "4 | 2 1 1") for n in range(1, 26)]
    frame = screen(shown(width, *views, force_terminal=True, color_system=None))
    assert all(len(line) <= width for line in frame)
    steps = [line.split() for line in frame if "1.23x" in line]
    assert [int(line[0]) for line in steps] == list(range(16, 26))
    assert steps[0][:7] == ["16", "5.5432", "12,346", "1603", "1500", "1.23x", "0.4"]
    assert "4 | 2 1 1" in next(line for line in frame if line.split()[:1] == ["16"])
    cut = next(line for line in frame if line.split()[:1] == ["17"]).rstrip()
    assert cut.endswith(LONG if width == 160 else "…")
    assert any("25/30" in line for line in frame)


def test_a_terminal_says_that_the_run_is_starting():
    out = shown(80, message="4 ranks", force_terminal=True, color_system=None)
    assert "4 ranks" in out
    assert "starting" in out


def test_a_dumb_terminal_gets_lines():
    program = (
        "from flexray.display import Display, StepView\n"
        f"with Display() as display: display.step({VIEW!r})\n"
    )
    leader, follower = os.openpty()
    try:
        environment = os.environ | {"TERM": "dumb", "COLUMNS": "100"}
        command = [sys.executable, "-c", program]
        subprocess.run(command, stdout=follower, check=True, env=environment)
        time.sleep(0.1)
        assert b"step  1/30  loss 5.5432" in os.read(leader, 10_000)
    finally:
        os.close(leader)
        os.close(follower)


def test_the_view_of_a_step():
    from flexray.batches import Batch
    from flexray.prefetch import PlannedBatch

    group = Group(2, (0, 1), (0,), (60,), 9.0)
    plan = Plan((MicroStep((group,), 10.0),), 10.0, 9.0, 0.1, "search")
    batch = Batch(3, (7,), (60,), 59)
    planned = PlannedBatch(batch, plan, best_single_ms=12.0, waited_s=0.0, request=None)
    event = StepEvent(
        step=3,
        loss=2.5,
        tokens=60,
        label_tokens=59,
        rows=[7],
        step_s=0.02,
        planned_s=0.01,
        plan_wait_s=0.001,
        solve_s=0.1,
        lower_bound_s=0.009,
        groups=[[2]],
        generation=1,
        learning_rate=1e-3,
        skipped=False,
        model_version=2,
        idle=[0.1, 0.0],
    )
    assert StepView.of(event, planned, steps=9) == StepView(
        step=3,
        steps=9,
        loss=2.5,
        tokens_per_s=pytest.approx(3000),
        plan="2",
        planned_ms=10.0,
        measured_ms=20.0,
        speedup=1.2,
        plan_wait_ms=1.0,
    )
