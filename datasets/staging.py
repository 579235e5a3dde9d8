"""A folder that appears whole or not at all."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
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
                _remove(folder)
    except FileNotFoundError:
        return  # just renamed or removed by its owner


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
