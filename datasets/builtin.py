"""The built-in corpus: the Python standard library's own source files, tokenised by bytes.

It is on every machine, is real text, and has a long tail: most files have a few KB, some hundreds.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import sysconfig
from pathlib import Path

import numpy as np

from flexray.datasets.corpus import Corpus
from flexray.datasets.errors import CorpusError
from flexray.datasets.manifest import FORMAT_VERSION
from flexray.datasets.staging import staged_folder
from flexray.datasets.tokenizer import BytesTokenizer
from flexray.datasets.writer import CorpusWriter

_NOT_ITS_OWN = {"site-packages", "dist-packages", "__pycache__"}


def builtin_corpus(cache_dir: Path | str | None = None) -> Path:
    """Folder of the built-in corpus, which is made on first use.

    Several processes may call this at once: each sees a whole corpus.

    Args:
        cache_dir: where corpora are kept; by default the user's cache, `$XDG_CACHE_HOME/flexray`
            or `~/.cache/flexray`.

    Raises:
        CorpusError: this Python comes without source files, or the cache cannot be written.
    """
    documents = _standard_library()
    digest = hashlib.sha256()
    for name, content in documents:
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    name = f"stdlib-{platform.python_version()}-{digest.hexdigest()[:12]}-v{FORMAT_VERSION}"
    folder = (Path(cache_dir) if cache_dir else _user_cache()) / name
    existed = folder.exists()
    try:
        Corpus.open(folder)
        return folder
    except CorpusError:
        if existed:
            shutil.rmtree(folder, ignore_errors=True)
    try:
        with staged_folder(folder) as staging:
            tokenizer = BytesTokenizer()
            writer = CorpusWriter(staging, tokenizer.info, tokenizer.vocab_size)
            for _, content in documents:
                ids = np.frombuffer(content, np.uint8).astype(np.int32)
                writer.add(np.array([len(ids)], np.int32), ids)
            writer.finish()
    except CorpusError:
        Corpus.open(folder)  # another process was first, unless this raises too
    except OSError as error:
        raise CorpusError(
            f"{folder}: cannot be written ({error.strerror}); "
            "set XDG_CACHE_HOME to a folder that can, or name another corpus"
        ) from None
    return folder


def _standard_library() -> list[tuple[str, bytes]]:
    """Name and content of every source file, sorted by name."""
    root = Path(sysconfig.get_path("stdlib"))
    files = (path.relative_to(root) for path in root.rglob("*.py"))
    own = sorted(path.as_posix() for path in files if _NOT_ITS_OWN.isdisjoint(path.parts))
    if not own:
        raise CorpusError(f"{root}: this Python has no source files; name a corpus of your own")
    return [(name, (root / name).read_bytes()) for name in own]


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flexray"
