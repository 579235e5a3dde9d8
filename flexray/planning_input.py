"""What `flexray plan` and `flexray simulate` both read: their shared options, and the rows kept."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import numpy as np
import typer

from flexray.errors import UserError
from flexray.length_source import Lengths
from flexray.presets import Preset, load_preset, preset_names
from flexray.solver.cluster import Cluster
from flexray.solver.cost import CostModel


class OverLength(StrEnum):
    """What to do with rows longer than the limit."""

    ERROR = "error"
    DROP = "drop"


SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="LENGTHS",
        help="A Parquet, Arrow, CSV or JSON-lines file with a column `length`, a corpus "
        "folder made by `flexray annotate`, or a list such as 48000,900,900,350.",
    ),
]
GpusOption = Annotated[int | None, typer.Option(help="GPUs of the cluster. Default: the preset's.")]
GpusPerNodeOption = Annotated[
    int | None,
    typer.Option(help="GPUs of a node. Default: 8, or the preset's where --gpus is not given."),
]
PRESET_HELP = f"Cost model: {', '.join(preset_names())}, or the path of a YAML file like them."
DegreesOption = Annotated[
    str | None,
    typer.Option(help="Group sizes allowed, such as 1,2,4. Default: the preset's, or all legal."),
]
MaxLengthOption = Annotated[
    int | None,
    typer.Option(help="Longest row, in tokens. Default: what the cluster can hold."),
]
OverLengthOption = Annotated[
    OverLength, typer.Option(help="Rows longer than that: an error, or left out and listed.")
]


def preset_for(name: str, max_length: int | None) -> Preset:
    """The preset; its learned positions reach at least to `max_length`."""
    preset = load_preset(name)
    if max_length is not None and max_length > preset.max_length:
        return preset.with_max_length(max_length)
    return preset


def cluster_for(preset: Preset, gpus: int | None, gpus_per_node: int | None) -> Cluster:
    """The cluster that the user named, else the preset's."""
    shape = preset.cluster_shape
    if gpus is None:
        return Cluster.uniform(
            shape.gpus, shape.gpus_per_node if gpus_per_node is None else gpus_per_node
        )
    return Cluster.uniform(gpus, 8 if gpus_per_node is None else gpus_per_node)


@dataclass(frozen=True)
class Limit:
    """Tokens of the longest row that is kept; `what` it is, and what a user can do to raise it."""

    tokens: int
    what: str
    remedies: tuple[str, ...] = ()


def limit_for(
    max_length: int | None,
    cost: CostModel,
    cluster: Cluster,
    degrees: tuple[int, ...],
    remedies: tuple[str, ...] = (),
) -> Limit:
    """What the user named, else what the largest group holds.

    Args:
        degrees: allowed ones, those that the cluster is too small for among them.
        remedies: how a user makes a GPU hold more.
    """
    if max_length is not None:
        if max_length < 1:
            raise UserError(f"--max-length {max_length}: give at least 1 token")
        return Limit(max_length, f"limit is {max_length} tokens", ("raise --max-length",))
    group = max(cost.options(cluster, degrees), key=lambda option: option.capacity)
    each = group.capacity // group.degree
    if each < cost.capacity(cluster.gpus):  # the largest pack, whatever the GPUs hold
        remedies = ()
    elif max(degrees) > cluster.gpus:
        remedies = (*remedies, "use more --gpus")
    gpus = f"{group.degree} GPU{'s' if group.degree > 1 else ''}"
    return Limit(group.capacity, f"capacity is {group.capacity} tokens ({gpus} x {each})", remedies)


def parse_degrees(text: str) -> tuple[int, ...]:
    """Group sizes as a user writes them: `1,2,4`."""
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise UserError(f"--degrees {text}: give whole numbers such as 1,2,4") from None


def admitted(lengths: Lengths, limit: Limit, over_length: OverLength) -> Lengths:
    """Rows of the input that are not over-long, in order, (admitted,).

    Raises:
        UserError: a negative length; a row over the limit, unless those are to be dropped.
    """
    if len(negative := np.flatnonzero(lengths < 0)):
        row = negative[0]
        raise UserError(f"row {row} has length {lengths[row]}: lengths must be 0 or more")
    over = np.flatnonzero(lengths > limit.tokens)
    if len(over) and over_length is OverLength.ERROR:
        row = over[0]
        raise UserError(
            f"row {row} has length {lengths[row]} and the {limit.what}"
            + (f" ({len(over) - 1} more rows are too long)" if len(over) > 1 else "")
            + f": {_choice(*limit.remedies, 'pass --over-length drop')}"
        )
    return np.flatnonzero(lengths <= limit.tokens)


def _choice(*options: str) -> str:
    comma = "," if len(options) > 2 else ""
    return f"{comma} or ".join(filter(None, (", ".join(options[:-1]), options[-1])))
