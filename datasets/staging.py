"""A folder that appears whole or not at all."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO
from uuid import uuid4

from flexray.datasets.errors import CorpusError
from flexray.datasets.manifest import MANIFEST_NAME, Manifest

LOCK_NAME = ".writing"


def check_free(out: Path, overwrite: bool) -> None:
    """Refuse an `out` that holds anything, but for a corpus that may be overwritten."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if problem := _foreign(out):
        raise CorpusError(
            f"{out}: is not a corpus ({problem}), not overwritten; choose another output folder"
        )
    if not overwrite:
        raise CorpusError(f"{out}: holds a corpus already; choose another folder, or --overwrite")


def _foreign(out: Path) -> str | None:
    """Why `out` is not, or not only, what FlexRay wrote: many things have a manifest.json."""
    if not out.is_dir():
        return "a file"
    try:
        own = _own_files(out)
    except (CorpusError, OSError):
        return f"it has no {MANIFEST_NAME} that says what is FlexRay's"
    for path in sorted(out.iterdir()):
        if path.name not in own or path.is_dir():
            return f"it holds {path.name}"
    return None


def _own_files(folder: Path) -> list[str]:
    """Names in a corpus folder that FlexRay wrote; the manifest, which says so, is last."""
    return [*(entry.name for entry in Manifest.read(folder).files), LOCK_NAME, MANIFEST_NAME]


@contextmanager
def staged_folder(
    out: Path, *, overwrite: bool = False, keep: Callable[[Path], bool] = lambda _: False
) -> Iterator[Path]:
    """Yield a sibling of `out` to write into; it becomes `out` when the block ends well.

    If the block raises or the process is killed, no `out` exists. A sibling that is worth it, as
    `keep` says, then stays, and the next call for the same `out` yields it again; any other that no
    living process holds is removed. Without such a one, the sibling is empty.

    Raises:
        CorpusError: `out` is taken (`check_free`), now or when the block ends.
    """
    check_free(out, overwrite)
    out = out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = f".{out.name}.partial-"
    folder, lock = _take_over(out, partial, keep) or _make(out, partial)
    try:
        yield folder
        (folder / LOCK_NAME).unlink()
        check_free(out, overwrite)
        if overwrite and out.exists():
            old = out.with_name(partial + uuid4().hex)
            # Held by nobody: if this process dies, the next cleans up.
            (out / LOCK_NAME).touch()
            out.rename(old)
            folder.rename(out)
            _remove(old)
        else:
            try:
                folder.rename(out)
            except OSError:  # another process was first, or `out` cannot be written
                check_free(out, overwrite)
                raise
    except BaseException:
        if keep(folder):
            (folder / LOCK_NAME).touch()
        else:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        lock.close()


def _make(out: Path, partial: str) -> tuple[Path, TextIO]:
    """An empty folder, and the lock that is held on it."""
    # It gets the name that others clean up only once it is locked.
    folder = out.with_name(f".{out.name}.new-{uuid4().hex}")
    folder.mkdir()
    lock = (folder / LOCK_NAME).open("w")
    _try_lock(lock.fileno())
    return folder.rename(out.with_name(partial + uuid4().hex)), lock


def _take_over(out: Path, partial: str, keep: Callable[[Path], bool]) -> tuple[Path, TextIO] | None:
    """What a dead process left that is worth keeping; all else that the dead left is removed."""
    found: tuple[Path, TextIO] | None = None
    for folder in sorted(out.parent.glob(f"{partial}*")):
        try:
            lock = (folder / LOCK_NAME).open("r+")
        except FileNotFoundError:
            continue  # just renamed or removed by its owner
        if not _try_lock(lock.fileno()):
            lock.close()
        elif found or not keep(folder):
            _remove(folder)
            lock.close()
        else:
            # Processes of the dead one that still write look for the old name.
            found = folder.rename(out.with_name(partial + uuid4().hex)), lock
    return found


def _try_lock(descriptor: int) -> bool:
    """Take the lock that dies with this process; False where it is held or not supported."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove(folder: Path) -> None:
    """Remove a corpus or a part of one; what somebody put beside its files meanwhile stays."""
    try:
        own = _own_files(folder)
    except CorpusError:  # it never was an `out` that anybody could see
        shutil.rmtree(folder, ignore_errors=True)
        return
    with suppress(OSError):
        for name in own:
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()
