"""YAML as its 1.2 core schema reads it, strictly: plain data only, and no key twice.

PyYAML follows YAML 1.1, where `1e-3` is text, `off` is false and `12:30` is 750. Configs that
people write by hand mean what 1.2 says.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

_PREFIX = "tag:yaml.org,2002:"
_SCALARS = [
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
]


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """PyYAML's table: first character of a plain scalar -> (tag, pattern) in order of trial."""
    table: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for kind, pattern, first in _SCALARS:
        for character in first:
            key = "" if character == "\0" else character
            table.setdefault(key, []).append((_PREFIX + kind, re.compile(f"^(?:{pattern})$")))
    return table


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = _resolvers()
    yaml_constructors = {  # noqa: RUF012 (PyYAML's own class attribute)
        tag: construct
        for tag, construct in yaml.SafeLoader.yaml_constructors.items()
        if tag is None
        or tag.removeprefix(_PREFIX) in {"null", "bool", "float", "str", "seq", "map"}
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(
                    problem="a key must be text", problem_mark=key.start_mark
                )
            if key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"key {key.value} is there twice", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node)
    return int(text, 0) if text[:2] in ("0x", "0o") else int(text)


_Loader.add_constructor(_PREFIX + "int", _construct_int)


class _Dumper(yaml.SafeDumper):
    # The same table, so that exactly what the loader would misread is quoted.
    yaml_implicit_resolvers = _resolvers()


def load(text: str | bytes) -> Any:
    """Parse one YAML document into dicts, lists, str, int, float, bool and None.

    Raises:
        ValueError: One line saying what is wrong and, where known, in which line and column.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise ValueError(f"{error.problem}{where}") from None
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


def dump(data: Any) -> str:
    """Write plain data as YAML that `load` reads back equal, keys in the order given."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False)


def kind(value: Any) -> str:
    """Name a loaded value in words for an error message: `'abc'`, `3`, `a list`, `null`."""
    names = {dict: "a mapping", list: "a list", type(None): "null"}
    if type(value) in names:
        return names[type(value)]
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
