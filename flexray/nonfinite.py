"""What to do about gradients that are not finite: skip the step, and end the run after a few."""

from __future__ import annotations

from collections.abc import Sequence

from flexray.actors.work import StepReport
from flexray.errors import RunFailed


class NonfinitePolicy:
    """Counts skipped steps in a row; the engine skips, the driver ends the run."""

    def __init__(self, most: int) -> None:
        """`most`: `train.max_nonfinite_steps`."""
        self._most = most
        self._in_a_row = 0

    def check(self, reports: Sequence[StepReport]) -> None:
        """Call after every step. Raises RunFailed when too many in a row were skipped.

        A step without a label token (no reports) was not skipped and was not finite either: it
        changes no count.
        """
        if not reports:
            return
        self._in_a_row = self._in_a_row + 1 if reports[0].skipped else 0
        if self._in_a_row >= self._most:
            raise RunFailed(
                f"the gradient was not finite in {self._in_a_row} steps in a row "
                "(train.max_nonfinite_steps): lower train.learning_rate or look at the rows of "
                "those steps in events.jsonl"
            )
