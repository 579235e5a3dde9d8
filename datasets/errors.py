"""The one error of the data layer."""

from __future__ import annotations


class CorpusError(ValueError):
    """Data that cannot be used. The message is one line: what is wrong, where, what to do."""
