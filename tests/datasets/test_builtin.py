from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from flexray.datasets.builtin import builtin_corpus
from flexray.datasets.corpus import Corpus
from flexray.datasets.errors import CorpusError


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made by four processes at once."""
    cache = tmp_path_factory.mktemp("cache")
    code = (
        "import sys; from flexray.datasets.builtin import builtin_corpus;"
        "from flexray.datasets.corpus import Corpus;"
        "print(Corpus.open(builtin_corpus(sys.argv[1])).path)"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(cache)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    paths = {process.communicate()[0].strip() for process in processes}
    assert {process.returncode for process in processes} == {0}
    assert len(paths) == 1
    assert [str(path) for path in cache.iterdir()] == list(paths), "nothing else is left"
    return cache


def test_holds_the_standard_library(cache: Path) -> None:
    corpus = Corpus.open(builtin_corpus(cache))
    root = Path(sysconfig.get_path("stdlib"))
    first = next(p for p in sorted(root.glob("*.py"), key=lambda p: p.name) if p.stat().st_size)
    sources = {corpus.tokens(row).astype(np.uint8).tobytes() for row in range(corpus.rows)}
    assert first.read_bytes() in sources
    assert (root / "json" / "decoder.py").read_bytes() in sources
    assert corpus.manifest.tokenizer.name == "bytes"
    assert corpus.rows > 500
    assert corpus.lengths.max() > 10 * np.median(corpus.lengths), "long-tailed"


def test_is_made_once(cache: Path) -> None:
    before = (builtin_corpus(cache) / "manifest.json").stat().st_mtime_ns
    assert (builtin_corpus(cache) / "manifest.json").stat().st_mtime_ns == before


def test_a_damaged_one_is_made_again(cache: Path) -> None:
    folder = builtin_corpus(cache)
    rows = Corpus.open(folder).rows
    part = folder / "part-00000.arrow"
    part.write_bytes(part.read_bytes()[:1000])
    assert Corpus.open(builtin_corpus(cache)).rows == rows


def test_default_place(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "flexray").symlink_to(cache)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert builtin_corpus().parent == tmp_path / "flexray"


def test_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CorpusError, match=r"cannot be written.*XDG_CACHE_HOME"):
        builtin_corpus(tmp_path / "file")


def test_takes_the_library_itself_as_bytes_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "b.py": b"second",
        "a/z.py": b"first, in latin-1: \xe9",
        "a/z.txt": b"no source",
        "site-packages/pip/x.py": b"somebody else's",
        "dist-packages/x.py": b"somebody else's",
        "empty.py": b"",
    }
    for name, content in files.items():
        path = tmp_path / "lib" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path / "lib"))
    corpus = Corpus.open(builtin_corpus(tmp_path / "cache"))
    rows = [corpus.tokens(row).astype(np.uint8).tobytes() for row in range(corpus.rows)]
    assert rows == [files["a/z.py"], files["b.py"]]
    assert corpus.manifest.dropped == {"empty": 1}

    (tmp_path / "lib" / "b.py").write_bytes(b"edited")
    assert builtin_corpus(tmp_path / "cache") != corpus.path, "the name follows the content"


def test_python_without_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(CorpusError, match="no source files"):
        builtin_corpus(tmp_path / "cache")
