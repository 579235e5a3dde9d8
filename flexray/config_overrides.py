"""`--set section.key=value`: one key changed from the command line."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from flexray import yaml_text
from flexray.errors import UserError


@dataclass(frozen=True)
class Override:
    """One `--set`: the key's path, the value read as YAML, and the text as typed."""

    keys: tuple[str, ...]
    value: Any
    text: str

    def as_typed(self) -> Override:
        """Return the same override with its value left as text."""
        return replace(self, value=self.text.partition("=")[2].strip())

    def __str__(self) -> str:
        return f"--set {self.text}"


def parse(text: str) -> Override:
    """Split `section.key=value`.

    Raises:
        UserError: No `=`, an empty part in the key, no section, or a value that is not YAML.
    """
    key, equals, value = text.partition("=")
    keys = tuple(key.strip().split("."))
    if not equals or len(keys) < 2 or not all(keys):
        raise UserError(f"--set {text}: must read section.key=value, such as train.steps=100")
    try:
        return Override(keys, yaml_text.load(value), text)
    except ValueError as error:
        raise UserError(f"--set {text}: the value is not valid YAML: {error}") from None


def apply(override: Override, data: dict[str, Any]) -> None:
    """Set the override's key in nested `data`, making the mappings on the way.

    Raises:
        UserError: The way leads through something that is no mapping.
    """
    *way, last = override.keys
    for depth, key in enumerate(way, 1):
        if data.get(key) is None:
            data[key] = {}
        data = data[key]
        if not isinstance(data, dict):
            name = ".".join(override.keys[:depth])
            raise UserError(f"{override}: {name} is {yaml_text.kind(data)}, not a mapping of keys")
    data[last] = override.value
