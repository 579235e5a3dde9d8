"""Which column of a table, or key of a JSON line, is read, and what stands beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flexray.datasets.errors import CorpusError

Kind = Literal["text", "chat", "tokens"]

LABELS = "labels"
MASKS = ("loss_mask", "completion_mask", "assistant_masks")  # of each token: 1 is trained on
TOOLS = "tools"
# What is read where no column is named: the first of these that is there.
_DEFAULTS: dict[str, Kind] = {"text": "text", "messages": "chat", "input_ids": "tokens"}
_BESIDE: dict[Kind, tuple[str, ...]] = {"text": (), "chat": (TOOLS,), "tokens": (LABELS, *MASKS)}


@dataclass(frozen=True)
class Chosen:
    """A column to read, what it holds, and the column beside it that is read with it, if any."""

    name: str
    kind: Kind
    beside: str | None = None

    @property
    def names(self) -> list[str]:
        """All columns to read."""
        return [self.name, self.beside] if self.beside else [self.name]

    @property
    def has_labels(self) -> bool:
        """Whether something says which tokens are trained on."""
        return self.kind == "chat" or (self.kind == "tokens" and self.beside is not None)


@dataclass(frozen=True)
class Column:
    """The column that was named, by what it holds; where all are None, one is found by name.

    Raises:
        CorpusError: more than one is named.
    """

    text: str | None = None
    tokens: str | None = None
    chat: str | None = None

    def __post_init__(self) -> None:
        if len(self._named) > 1:
            raise CorpusError("give a text column, a tokens column or a chat column, not several")

    @property
    def _named(self) -> dict[str, Kind]:
        kinds: dict[Kind, str | None] = {
            "text": self.text,
            "tokens": self.tokens,
            "chat": self.chat,
        }
        return {name: kind for kind, name in kinds.items() if name}

    @property
    def named(self) -> str | None:
        """The name that was given."""
        return next(iter(self._named), None)

    def choose(self, names: list[str], where: str) -> Chosen:
        """What to read of columns `names`.

        Raises:
            CorpusError: there is no such column, or several say which tokens are trained on.
        """
        candidates = self._named or _DEFAULTS
        name = next((name for name in candidates if name in names), None)
        if name is None:
            *others, last = map(repr, candidates)
            wanted = f"{', '.join(others)} or {last}" if others else last
            raise CorpusError(
                f"{where}: no column {wanted}; it has {', '.join(names) or 'none'}: name the "
                "column with text, token ids or chat messages"
            )
        kind = candidates[name]
        beside = [mark for mark in _BESIDE[kind] if mark in names and mark != name]
        if len(beside) > 1:
            raise CorpusError(
                f"{where}: both `{beside[0]}` and `{beside[1]}` say what is trained on; keep one"
            )
        marks = [mark for mark in _BESIDE["tokens"] if mark in names]
        if self.named is None and kind != "tokens" and marks and "input_ids" in names:
            raise CorpusError(
                f"{where}: has `{name}`, and token ids with `{marks[0]}`: "
                f"name the {kind} column or the tokens column"
            )
        return Chosen(name, kind, beside[0] if beside else None)
