"""Where files are: local paths, and URLs through pyarrow or, for other schemes, fsspec."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import pyarrow as pa
import pyarrow.fs

from flexray.datasets.errors import CorpusError

Folder = tuple[str, list[str], list[str]]  # as os.walk yields: path, folders, files


def is_url(given: str) -> bool:
    """Whether `given` is a URL of a remote file system."""
    return "://" in given


class Location:
    """Files that one input names; paths are those of its file system.

    Attributes:
        url: the URL that says which file system it is; empty for local files.
        path: of the input, which may be a glob.
    """

    def __init__(self, given: str) -> None:
        if given.startswith("file://"):
            given = pa.fs.FileSystem.from_uri(given)[1]
        self.given, self.url, self.path = given, "", given
        self._known: dict[str, pa.fs.FileInfo] = {}
        if is_url(given):
            base, _, query = given.partition("?")
            start = _magic(base)
            # The part before a glob is resolved: a glob is no valid URL.
            root = base if start is None else base[:start].rpartition("/")[0]
            self.url = root + (f"?{query}" if query else "")
            self.path = filesystem(self.url)[1] + base[len(root) :]
            self.given = _shown(base)
            self._prefix = self.given.removesuffix(self.path.lstrip("/"))
            if self._prefix == self.given:
                self._prefix = base.partition("://")[0] + "://"

    def matches(self) -> list[str]:
        """The path itself, or what its glob matches, sorted: no hidden names, no folders for **.

        Raises:
            CorpusError: there is nothing.
        """
        is_there = not self.url and os.path.lexists(self.path)
        if is_there or _magic(self.path, "*[" if self.url else "*?[") is None:
            return [self.path]
        with _readable(self.given):
            if self.url:
                from fsspec.implementations.arrow import ArrowFSWrapper

                found = ArrowFSWrapper(filesystem(self.url)[0]).glob(self.path)
                if "/." not in self.path:
                    found = [path for path in found if "/." not in path]
            else:
                found = glob.glob(self.path, recursive=True)  # noqa: PTH207
            # ** matches what is in a folder besides the folder itself.
            paths = [path for path in found if "**" not in self.path or not self.stat(path)[0]]
        if not paths:
            raise CorpusError(f"{self.given}: no file matches")
        return sorted(paths)

    def name(self, path: str) -> str:
        """How `path` is called in messages."""
        return self._prefix + path.lstrip("/") if self.url else path

    def stat(self, path: str) -> tuple[bool, int, int]:
        """Whether `path` is a folder, its size in bytes and when it changed (ns; 0: not known).

        Raises:
            CorpusError: it does not exist, or cannot be read.
        """
        with _readable(self.name(path)):
            if not self.url:
                found = Path(path).stat()
                return Path(path).is_dir(), found.st_size, found.st_mtime_ns
            if path not in self._known:  # a folder's files are known from its listing
                self._known[path] = filesystem(self.url)[0].get_file_info(path)
        info = self._known[path]
        if info.type == pa.fs.FileType.NotFound:
            raise CorpusError(f"{self.name(path)}: no such file or folder")
        return info.type == pa.fs.FileType.Directory, info.size or 0, info.mtime_ns or 0

    def walk(self, root: str) -> Iterator[Folder]:
        """As os.walk: folders are left out by removing them from the list."""
        with _readable(self.name(root)):
            if not self.url:
                yield from os.walk(root, onerror=_raise)
                return
            listing = filesystem(self.url)[0].get_file_info(
                pa.fs.FileSelector(root, recursive=True)
            )
        self._known |= {info.path: info for info in listing}
        folders: dict[str, list[str]] = {}
        files: dict[str, list[str]] = {}
        for info in listing:
            here, _, name = info.path.rpartition("/")
            of = folders if info.type == pa.fs.FileType.Directory else files
            of.setdefault(here, []).append(name)
        pending = [root.rstrip("/")]
        while pending:
            here = pending.pop()
            inside = folders.get(here, [])
            yield here, inside, files.get(here, [])
            pending += [f"{here}/{name}" for name in reversed(inside)]


def open_file(url: str, path: str) -> pa.NativeFile:
    """Opens `path` on the file system of `url` ("": local) for reading at any place."""
    if url:
        return filesystem(url)[0].open_input_file(path)
    return pa.memory_map(path) if Path(path).stat().st_size else pa.BufferReader(b"")


@lru_cache(maxsize=64)
def filesystem(url: str) -> tuple[pa.fs.FileSystem, str]:
    """The file system of a URL, and the URL's path on it.

    Raises:
        CorpusError: the scheme is not known, or lacks its package or its credentials.
    """
    if url.startswith(("gs://", "gcs://")) and "retry_limit_seconds=" not in url:
        # Else Arrow tries for a quarter of an hour to reach what is not there.
        url += ("&" if "?" in url else "?") + "retry_limit_seconds=20"
    with _readable(_shown(url)):
        try:
            found: tuple[pa.fs.FileSystem, str] = pa.fs.FileSystem.from_uri(url)
            return found
        except pa.ArrowInvalid as error:
            if "Unrecognized filesystem" not in str(error):
                raise
        import fsspec

        remote, path = fsspec.core.url_to_fs(url)
        return pa.fs.PyFileSystem(pa.fs.FSSpecHandler(remote)), path


def _shown(url: str) -> str:
    """Without what may be secret."""
    return re.sub(r"//[^/@]*@", "//", url.partition("?")[0])


def _magic(path: str, characters: str = "*[") -> int | None:
    """Where a glob begins; a URL's ? begins its query."""
    return next((i for i, character in enumerate(path) if character in characters), None)


def _raise(error: OSError) -> None:
    raise error


@contextmanager
def _readable(name: str) -> Iterator[None]:
    """Makes one line of whatever a file system raises: each has errors of its own."""
    try:
        yield
    except CorpusError:
        raise
    except FileNotFoundError:
        raise CorpusError(f"{name}: no such file or folder") from None
    except Exception as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        reason = reason[:300] or type(error).__name__
        raise CorpusError(f"{name}: cannot be read ({reason})") from None
