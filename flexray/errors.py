"""The error a user can act on."""

from __future__ import annotations


class UserError(ValueError):
    """Something the user can put right: one line that says what is wrong, where, and what to do.

    The command line prints it on stderr and exits with 2, without a traceback.
    """


class RunFailed(RuntimeError):
    """The run cannot go on: one line that says why."""
