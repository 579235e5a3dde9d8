"""A folder that appears whole or not at all."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from flexray.datasets.errors import CorpusError
from flexray.datasets.manifest import MANIFEST_NAME

LOCK_NAME = ".writing"


def check_free(out: Path, overwrite: bool) -> None:
    """Refuse an `out` that holds anything, but for a corpus that may be overwritten."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not (out / MANIFEST_NAME).is_file():
        raise CorpusError(f"{out}: exists and is not a corpus; choose another output folder")
    if not overwrite:
        raise CorpusError(f"{out}: holds a corpus already; choose another folder, or --overwrite")


@contextmanager
def staged_folder(out: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield an empty sibling of `out` to write into; it becomes `out` when the block ends well.

    If the block raises, the sibling is removed; if the process is killed, the sibling stays, but
    no `out` exists, and the next call for the same `out` removes what no living process holds.

    Raises:
        CorpusError: `out` is taken (`check_free`), now or when the block ends.
    """
    check_free(out, overwrite)
    out = out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = f".{out.name}.partial-"
    for leftover in out.parent.glob(f"{partial}*"):
        _remove_if_abandoned(leftover)
    # It gets the name that others clean up only once it is locked.
    folder = out.with_name(f".{out.name}.new-{uuid4().hex}")
    folder.mkdir()
    try:
        with (folder / LOCK_NAME).open("w") as lock:
            _try_lock(lock.fileno())
            folder = folder.rename(out.with_name(partial + uuid4().hex))
            yield folder
            (folder / LOCK_NAME).unlink()
            check_free(out, overwrite)
            if overwrite and out.exists():
                old = out.with_name(partial + uuid4().hex)
                (
                    out / LOCK_NAME
                ).touch()  # held by nobody: if this process dies, the next cleans up
                out.rename(old)
                folder.rename(out)
                shutil.rmtree(old, ignore_errors=True)
            else:
                try:
                    folder.rename(out)
                except OSError:  # another process was first, or `out` cannot be written
                    check_free(out, overwrite)
                    raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _try_lock(descriptor: int) -> bool:
    """Take the lock that dies with this process; False where it is held or not supported."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove_if_abandoned(folder: Path) -> None:
    try:
        with (folder / LOCK_NAME).open("r+") as lock:
            if _try_lock(lock.fileno()):
                shutil.rmtree(folder, ignore_errors=True)
    except FileNotFoundError:
        return  # just renamed or removed by its owner
