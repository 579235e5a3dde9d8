"""Streams of random numbers that a name and a seed decide, so that no world size does."""

from __future__ import annotations

import hashlib


def stream(seed: int, name: str) -> int:
    """A seed of its own for `name`."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
