"""Skipped steps in a row end a run; others do not."""

from __future__ import annotations

import pytest

from flexray.actors.work import StepReport
from flexray.errors import RunFailed
from flexray.nonfinite import NonfinitePolicy


def reports(skipped):
    return [
        StepReport(1, 1, rank, 1.0, 1.0, 1e-3, skipped, (), 0, 1.0, 0.0, 0.0, 1.0, False)
        for rank in (0, 1)
    ]


def test_only_skipped_steps_in_a_row_end_the_run():
    policy = NonfinitePolicy(3)
    for skipped in (True, True, False, True, True, None):  # None: no label token in the step
        policy.check([] if skipped is None else reports(skipped))
    with pytest.raises(RunFailed, match="was not finite in 3 steps in a row"):
        policy.check(reports(True))
