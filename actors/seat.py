"""An actor's place in a generation, and where its training state comes from. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Holding:
    """A whole host copy of one owner's training state, which an actor has."""

    generation: int
    step: int  # the state is that after this step
    owner: int  # index of the parameter shard
    updates: int  # that the optimizer had made


@dataclass(frozen=True)
class Left:
    """What an actor tells when it has left a generation."""

    holdings: tuple[Holding, ...]  # its whole host copies
    ran_out: bool  # of memory, and so the generation ended


@dataclass(frozen=True)
class Initial:
    """Start from the weights that the settings name, before step 1."""

    step: int = 0


@dataclass(frozen=True)
class Saved:
    """Start from a checkpoint."""

    location: str
    step: int
    counters: dict[str, int] = field(hash=False)


@dataclass(frozen=True)
class Copies:
    """Start from host copies of an older generation."""

    generation: int
    step: int
    owners: int
    updates: int
    holders: tuple[tuple[int, ...], ...]  # by owner: participants that have its copy


@dataclass(frozen=True)
class Seat:
    """An actor's place among the participants of a new generation.

    Members are participants 0 to world - 1. Those after them leave: they only serve their copies.
    """

    generation: int
    rank: int
    world: int
    participants: int
    host: str  # of the driver's store
    port: int
    buddy: int  # rank r's copies are kept by rank (r + buddy) % world
    origin: Initial | Saved | Copies
    one_node: bool = False  # all members are on it


@dataclass(frozen=True)
class JoinReport:
    """What joining took on one rank."""

    form_s: float
    build_s: float
    restore_s: float
    sent_mb: float
    received_mb: float
    copies_mb: float  # host memory of this rank's copies
