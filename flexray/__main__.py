"""`flexray` and `python -m flexray`: runs a command; what the user can put right is one line."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line: exit code 2 for the user's errors, 130 for Ctrl-C."""
    try:
        from flexray.cli import app

        app(prog_name="flexray")
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        sys.exit(130)
    except ValueError as error:
        # What was raised in a Ray task arrives wrapped, with its traceback in the text.
        cause = getattr(error, "cause", None) or error
        if not _is_users(cause):
            raise
        print("error:", " ".join(str(cause).split()), file=sys.stderr)
        sys.exit(2)


def _is_users(error: BaseException) -> bool:
    # Imported only now: `--help` loads no planner.
    from flexray.datasets.errors import CorpusError
    from flexray.errors import UserError
    from flexray.solver.plan import PlanningError

    return isinstance(error, UserError | CorpusError | PlanningError)


if __name__ == "__main__":
    main()
