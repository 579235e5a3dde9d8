"""pydantic's errors as one line: the key, where it was set, what is wrong, what would be right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from flexray import yaml_text
from flexray.config_overrides import Override

_WORDS = {
    "a valid integer": "an integer",
    "a valid number": "a number",
    "a valid boolean": "true or false",
    "a valid array": "a list",
    "an object": "a mapping of keys",
    "String should": "must",
}


def describe(
    model: type[BaseModel], errors: Sequence[ErrorDetails], source: str, given: Sequence[Override]
) -> str:
    """Return one line for all `errors`, each led by the `--set` or else the file it came from."""
    lines: dict[str, None] = {}  # an ordered set
    for error in errors:
        if error["type"] == "default_factory_not_called":  # for want of a key that is wrong itself
            continue
        path = tuple(map(str, error["loc"]))
        origin = next((str(o) for o in reversed(given) if _touches(o.keys, path)), source)
        lines[f"{origin}: {_what(model, path, error)}"] = None
    return " ".join("; ".join(lines).split())


def _touches(keys: tuple[str, ...], path: tuple[str, ...]) -> bool:
    shared = min(len(keys), len(path))
    return keys[:shared] == path[:shared]


def _what(model: type[BaseModel], path: tuple[str, ...], error: ErrorDetails) -> str:
    name = ".".join(path)
    value = yaml_text.kind(error["input"])
    match error["type"]:
        case "extra_forbidden":
            return f"unknown key {name}: {_nearest(model, path)}"
        case "value_error":
            return str(error["ctx"]["error"])
        case "model_type":
            return f"{name}: must be a mapping of keys, not {value}"
        case "missing":
            return f"{name}: is missing"
        case "too_short":
            return f"{name}: has {len(error['input'])} items, needs {error['ctx']['min_length']}"
        case "too_long":
            return f"{name}: has {len(error['input'])} items, takes {error['ctx']['max_length']}"
        case "string_pattern_mismatch":
            return (
                f"{name}: must be letters, digits, '.', '_' and '-' (at most 100, "
                f"the first a letter or digit), not {value}"
            )
        case "string_type":
            hint = ", in quotes" if isinstance(error["input"], int | float) else ""
            return f"{name}: must be text{hint}, not {value}"
    message = error["msg"].replace("Input should", "must")
    for theirs, ours in _WORDS.items():
        message = message.replace(theirs, ours)
    return f"{name}: {message}, not {value}"


def _nearest(model: type[BaseModel], path: tuple[str, ...]) -> str:
    """Say which key was meant; where none is near, which there are."""
    known = list(_keys(model))
    *section, name = path
    inside = tuple(part for part in section if not part.isdigit())  # items of lists are alike
    siblings = [key[-1] for key in known if key[:-1] == inside]
    if near := get_close_matches(name, siblings, 1):
        return f"did you mean {'.'.join((*section, near[0]))}?"
    if elsewhere := [key for key in known if key[-1] == name]:
        return f"did you mean {'.'.join(elsewhere[0])}?"
    return f"allowed here: {', '.join(siblings)}"


def _keys(model: type[BaseModel], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, field in model.model_fields.items():
        yield (*above, name)
        for inner in _models(field.annotation):
            yield from _keys(inner, (*above, name))


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The sections that a key's value may hold, also as items of a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)
