"""Finds out in seconds that no Ray answers at an address: Ray itself tries for minutes."""

from __future__ import annotations

import socket

from flexray.errors import UserError

_SECONDS = 10


def check_answers(address: str) -> None:
    """Raises UserError if nothing listens at `address`, where it is a host and a port."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not port.isdigit():  # "auto", "local"
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _SECONDS).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"no Ray cluster answers at {address} ({reason})") from None
