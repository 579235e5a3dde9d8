"""Compiled kernels in one place per user, found by every copy of the package.

numba keeps compiled code beside the source file or under a name made of its path. Ray unpacks
`py_modules` into a new folder for every session, which would compile again each time; here the
place depends on the source's content alone.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import InTreeCacheLocator


class ContentCacheLocator(InTreeCacheLocator):  # type: ignore[misc]
    """Caches under `$XDG_CACHE_HOME/flexray/kernels-<hash of the source file>`."""

    def __init__(self, py_func: Any, py_file: str) -> None:
        super().__init__(py_func, py_file)
        home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        content = hashlib.sha256(Path(py_file).read_bytes()).hexdigest()[:16]
        self._cache_path = str(home / "flexray" / f"kernels-{content}")


def kernel(function: Callable[..., Any]) -> Any:
    """`numba.njit` with the cache above; `NUMBA_CACHE_DIR` still wins, no cache is no error."""
    if numba.config.CACHE_DIR:
        return numba.njit(cache=True)(function)
    kept = getattr(numba.config, "CACHE_LOCATOR_CLASSES", "")
    numba.config.CACHE_LOCATOR_CLASSES = (
        f"{__name__}.ContentCacheLocator,InTreeCacheLocator,UserWideCacheLocator"
    )
    try:
        return numba.njit(cache=True)(function)
    except RuntimeError:  # no place that can be written
        return numba.njit(function)
    finally:
        numba.config.CACHE_LOCATOR_CLASSES = kept
