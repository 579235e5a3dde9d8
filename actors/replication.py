"""Host copies on their way: from every rank to its buddy, while training goes on.

Plain sockets and two threads. gloo cannot end a receive, and so ranks in a ring of which one has
failed elsewhere would wait for one another until a time-out; here `close` ends everything at once.

Usage, on every rank of a generation alike:
    replication = Replication(store, rank, world, buddy, address, timeout_s, slots)
    replication.send(copy)    # comes into the buddy's next slot; slots take turns
    replication.wait(1)       # for the first copy, of this rank and of its ward
    replication.close()
"""

from __future__ import annotations

import hmac
import secrets
import select
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import cycle
from queue import SimpleQueue
from threading import Condition, Thread

import torch
from torch.distributed import Store

from flexray.actors.host_copy import HostCopy, Tag
from flexray.actors.rendezvous import (
    INIT_TIMEOUT,
    START_TIMEOUT_S,
    CollectiveFailed,
    meet,
    wait_for,
)

PIECE = 4 << 20  # bytes
HEADER = struct.Struct("!3q")  # of a copy: its tag
TOKEN_BYTES = 16  # that a ward shows, so that nobody else's bytes are taken for a copy


class Replication:
    """One rank's two connections: to its buddy and from its ward."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world: int,
        buddy: int,
        address: str,
        timeout_s: float,
        slots: Sequence[HostCopy],
    ) -> None:
        """A collective call. `address`: this node's, for the ward; `slots`: for the ward's copies.

        Rank (rank + buddy) % world is the buddy. Raises CollectiveFailed.
        """
        self._timeout_s = timeout_s
        self._changed = Condition()
        self._moved = {"sent": 0, "received": 0}  # copies
        self._failures: dict[str, str] = {}  # the same keys
        self._slots = cycle(slots)
        self._copies: SimpleQueue[HostCopy | None] = SimpleQueue()
        self._to, self._from = _connect(store, rank, world, buddy, address)
        self._threads = [
            Thread(target=self._run, args=(how, move), daemon=True)
            for how, move in (("sent", self._send_next), ("received", self._receive_next))
        ]
        for thread in self._threads:
            thread.start()

    def send(self, copy: HostCopy) -> None:
        """Queues a copy. It must stay as it is until `wait` has returned."""
        self._copies.put(copy)

    def wait(self, copies: int) -> None:
        """Until the first `copies` copies have been sent, and as many received.

        Raises CollectiveFailed when that cannot be.
        """

        def left() -> list[str]:
            return [how for how, moved in self._moved.items() if moved < copies]

        def is_over() -> bool:
            # A peer that has all it needs may leave before this rank knows that it sent the last.
            return not left() or any(how in self._failures for how in left())

        with self._changed:
            self._changed.wait_for(is_over, self._timeout_s)
            for how in sorted(left(), key=lambda how: how not in self._failures):
                why = self._failures.get(how, f"not {how} after {self._timeout_s:g} s")
                raise CollectiveFailed(f"replication of snapshots: {why}")

    def close(self) -> None:
        """Ends both threads and closes both connections, whatever they wait for."""
        for connection in (self._to, self._from):
            with suppress(OSError):  # the peer has gone
                connection.shutdown(socket.SHUT_RDWR)
        self._copies.put(None)
        for thread in self._threads:
            thread.join()
        self._to.close()
        self._from.close()

    def _run(self, how: str, move: Callable[[], bool]) -> None:
        try:
            while move():
                with self._changed:
                    self._moved[how] += 1
                    self._changed.notify_all()
        except Exception as error:
            with self._changed:
                self._failures[how] = f"{type(error).__name__}: {error}"
                self._changed.notify_all()

    def _send_next(self) -> bool:
        copy = self._copies.get()
        if copy is None:
            return False
        assert copy.tag is not None
        self._to.sendall(HEADER.pack(*copy.tag))
        for piece in _pieces(copy):
            self._to.sendall(piece)
        return True

    def _receive_next(self) -> bool:
        header = memoryview(bytearray(HEADER.size))
        _receive(self._from, header)
        slot = next(self._slots)
        slot.tag = None
        for piece in _pieces(slot):
            _receive(self._from, piece)
        slot.tag = Tag(*HEADER.unpack(header))
        return True


def _pieces(copy: HostCopy) -> Iterator[memoryview]:
    """All bytes of a copy, some MiB at a time; they share its memory."""
    for buffer in copy.buffers.values():
        # By bytes: numpy knows no bfloat16.
        data = memoryview(buffer.view(torch.uint8).numpy())
        for start in range(0, len(data), PIECE):
            yield data[start : start + PIECE]


def _receive(connection: socket.socket, place: memoryview) -> None:
    """Fills `place`. Raises EOFError when the peer has gone."""
    while place:
        received = connection.recv_into(place)
        if not received:
            raise EOFError("the rank whose copies this one keeps has gone")
        place = place[received:]


def _connect(
    store: Store, rank: int, world: int, buddy: int, address: str
) -> tuple[socket.socket, socket.socket]:
    """Connections to the buddy and from the ward."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as listener:  # port 0: any free one
        token = secrets.token_hex(TOKEN_BYTES)
        port = listener.getsockname()[1]
        store.set(f"replication/{rank}", f"{address} {port} {token}")
        meet(store, "replication", rank, world, START_TIMEOUT_S)  # others may still build
        host, port, shown = store.get(f"replication/{(rank + buddy) % world}").decode().split()
        to = socket.create_connection((host, int(port)), timeout=INIT_TIMEOUT.total_seconds())
        to.settimeout(None)
        to.sendall(bytes.fromhex(shown))
        try:
            return to, _accept(listener, bytes.fromhex(token), store, rank)
        except BaseException:
            to.close()
            raise


def _accept(listener: socket.socket, token: bytes, store: Store, rank: int) -> socket.socket:
    """The connection of the rank that shows this token."""
    what = f"replication: rank {rank} waits for the rank whose copies it keeps"
    while True:
        wait_for(
            store,
            lambda: bool(select.select([listener], [], [], 0)[0]),
            what,
            INIT_TIMEOUT.total_seconds(),
        )
        connection, _ = listener.accept()
        connection.settimeout(INIT_TIMEOUT.total_seconds())
        shown = memoryview(bytearray(len(token)))
        with suppress(OSError, EOFError):
            _receive(connection, shown)
        if hmac.compare_digest(shown, token):
            connection.settimeout(None)
            return connection
        connection.close()
