"""Host copies that a rank and its buddy share, where all ranks are on one node.

What a process has written into shared memory is there when it has died, as long as another one has
mapped it: the buddy has the copy at once, with nothing sent and nothing held twice. (Against the
death of the node only a buddy elsewhere helps, and there is none.)

Memory is anonymous (memfd): it ends with the last process that maps it, however that ends.
"""

from __future__ import annotations

import os
import secrets
from contextlib import ExitStack
from mmap import PAGESIZE as PAGE
from pathlib import Path

import torch
from torch.distributed import Store

from flexray.actors.host_copy import HostCopy, Layout
from flexray.actors.rendezvous import START_TIMEOUT_S, meet

Copies = list[HostCopy]
TOKEN_BYTES = 16  # that show a ward's memory to be what it was said to be


def share(
    store: Store, rank: int, world: int, buddy: int, layout: Layout, *, pinned: bool
) -> tuple[Copies, Copies] | None:
    """Two copies of this rank's own and its ward's two; None on all ranks where one cannot.

    A collective call. Rank (rank - buddy) % world is the ward. Processes that cannot see each other
    (containers that share a network only) cannot share. Raises CollectiveFailed.
    """
    token = secrets.token_bytes(TOKEN_BYTES)
    ward = (rank - buddy) % world
    with ExitStack() as files:
        own = [_new_file(layout, rank, token, files) for _ in range(2)]
        numbers = " ".join(map(str, own))
        store.set(f"sharing/{rank}", f"{os.getpid()} {token.hex()} {numbers}")
        meet(store, "sharing", rank, world, START_TIMEOUT_S)  # others may still build
        pid, shown, *numbers = store.get(f"sharing/{ward}").decode().split()
        theirs = [Path(f"/proc/{pid}/fd/{number}") for number in numbers]
        works = all(_token(path) == shown for path in theirs)
        store.set(f"sharing/works/{rank}", "yes" if works else "no")
        if works:
            wards = [_copy(path, layout, ward, pinned=False) for path in theirs]
        meet(store, "sharing/tried", rank, world, START_TIMEOUT_S)
        if any(store.get(f"sharing/works/{other}") == b"no" for other in range(world)):
            return None
        return [_copy(Path(f"/proc/self/fd/{f}"), layout, rank, pinned=pinned) for f in own], wards


def _new_file(layout: Layout, owner: int, token: bytes, files: ExitStack) -> int:
    file = os.memfd_create("flexray-host-copy")
    files.callback(os.close, file)
    os.ftruncate(file, PAGE + HostCopy.size(layout, owner))
    os.pwrite(file, token, 0)
    return file


def _token(path: Path) -> str:
    """What a file begins with; empty for one that cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(TOKEN_BYTES).hex()
    except OSError:
        return ""


def _copy(path: Path, layout: Layout, owner: int, *, pinned: bool) -> HostCopy:
    size = HostCopy.size(layout, owner)
    memory = torch.from_file(str(path), shared=True, size=PAGE + size, dtype=torch.uint8)[PAGE:]
    if pinned:
        # Else copies from the GPU go through a buffer of the driver's.
        torch.cuda.check_error(
            torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), len(memory), 0)
        )
    return HostCopy(layout, owner, memory=memory)
