"""Nothing half-made is ever visible, whatever dies when."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flexray.datasets.annotate import annotate
from flexray.datasets.corpus import Corpus
from flexray.datasets.errors import CorpusError
from flexray.datasets.staging import staged_folder

ANNOTATE_AND_STOP = """
import sys, time
from flexray.datasets.annotate import annotate
source, out, rows, overwrite = sys.argv[1:]
def stop(at):
    if at.rows >= int(rows):
        print("stopped", flush=True)
        time.sleep(600)
annotate([source], out, "bytes", progress=stop, overwrite=overwrite == "True")
"""


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "some words"}\n' * 100_000)
    return path


def annotate_until(source: Path, out: Path, rows: int, overwrite: bool) -> subprocess.Popen[str]:
    """A process that has annotated that many rows and now stands still."""
    arguments = [str(source), str(out), str(rows), str(overwrite)]
    process = subprocess.Popen(
        [sys.executable, "-c", ANNOTATE_AND_STOP, *arguments], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "stopped\n"
    return process


@pytest.mark.parametrize(
    "rows", [1, 60_000, 100_000], ids=["begun", "half-way", "manifest written"]
)
@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "overwrite"])
def test_sigkill(tmp_path: Path, source: Path, rows: int, overwrite: bool) -> None:
    out = tmp_path / "corpora" / "out"
    if overwrite:
        (tmp_path / "old.txt").write_text("old")
        annotate([tmp_path / "old.txt"], out, "bytes")
    process = annotate_until(source, out, rows, overwrite)
    process.send_signal(signal.SIGKILL)
    process.communicate()

    assert [p.name for p in out.parent.iterdir() if not p.name.startswith(".")] == (
        ["out"] if overwrite else []
    )
    if overwrite:
        assert Corpus.open(out).rows == 1
    else:
        with pytest.raises(CorpusError, match="no such corpus"):
            Corpus.open(out)

    assert annotate([source], out, "bytes", overwrite=overwrite).rows == 100_000
    assert names(out.parent) == ["out"], "the dead run's files are gone"


def test_a_living_run_is_left_alone(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "corpora" / "out"
    process = annotate_until(source, out, 60_000, overwrite=False)
    try:
        annotate([source], out, "bytes")
        assert len(list(out.parent.iterdir())) == 2
    finally:
        process.kill()
        process.communicate()


def test_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.txt", tmp_path / "bad.txt"
    good.write_bytes(b"good")
    bad.write_bytes(b"\xff")
    out = tmp_path / "corpora" / "out"
    annotate([good], out, "bytes")
    with pytest.raises(CorpusError, match="not UTF-8"):
        annotate([good, bad], out, "bytes", overwrite=True)
    assert Corpus.open(out).rows == 1
    assert names(out.parent) == ["out"]


def test_an_existing_corpus_is_kept_unless_told(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").write_text("bb")
    annotate([tmp_path / "a.txt"], tmp_path / "out", "bytes")
    with pytest.raises(CorpusError, match=r"holds a corpus already.*--overwrite"):
        annotate([tmp_path / "b.txt"], tmp_path / "out", "bytes")
    assert Corpus.open(tmp_path / "out").lengths.tolist() == [1]
    annotate([tmp_path / "b.txt"], tmp_path / "out", "bytes", overwrite=True)
    assert Corpus.open(tmp_path / "out").lengths.tolist() == [2]


def test_other_folders_are_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("years of work")
    for target in ("thesis", "a.txt"):
        with pytest.raises(CorpusError, match="is not a corpus"):
            annotate([tmp_path / "a.txt"], tmp_path / target, "bytes", overwrite=True)
    assert (tmp_path / "thesis" / "chapter").read_text() == "years of work"


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_manifest_alone_makes_no_corpus(tmp_path: Path) -> None:
    """Web apps and browser extensions have a manifest.json too."""
    (tmp_path / "a.txt").write_text("a")
    app = tmp_path / "app"
    app.mkdir()
    (app / "manifest.json").write_text('{"name": "my app"}')
    (app / "index.html").write_text("years of work")
    before = files(app)
    for overwrite in (True, False):
        with pytest.raises(CorpusError, match=r"app: is not a corpus .*not overwritten"):
            annotate([tmp_path / "a.txt"], app, "bytes", overwrite=overwrite)
    assert files(app) == before
    assert sorted(names(tmp_path)) == ["a.txt", "app"]


@pytest.mark.parametrize("name", ["notes.txt", "part-00001.arrow", "plots/loss.png", ".git/HEAD"])
def test_a_corpus_with_something_beside_it_is_kept(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.txt").write_text("a")
    out = tmp_path / "out"
    annotate([tmp_path / "a.txt"], out, "bytes")
    (out / name).parent.mkdir(exist_ok=True)
    (out / name).write_text("mine")
    before = files(out)
    with pytest.raises(CorpusError, match=f"not a corpus .*{name.split('/')[0]}.*not overwritten"):
        annotate([tmp_path / "a.txt"], out, "bytes", overwrite=True)
    assert files(out) == before


def test_what_is_put_there_while_it_is_written_is_kept(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    out = tmp_path / "out"
    annotate([tmp_path / "a.txt"], out, "bytes")
    with pytest.raises(CorpusError, match="not overwritten"), staged_folder(out, overwrite=True):
        (out / "notes.txt").write_text("mine")
    assert (out / "notes.txt").read_text() == "mine"
    assert Corpus.open(out).rows == 1


def test_a_dead_overwriter_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("bb")
    annotate([tmp_path / "b.txt"], tmp_path / "out", "bytes")
    (tmp_path / "out" / ".writing").touch()  # it died just before it moved the folder away
    annotate([tmp_path / "b.txt"], tmp_path / "out", "bytes", overwrite=True)
    assert sorted(names(tmp_path)) == ["b.txt", "out"]


def test_an_empty_folder_may_become_the_corpus(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "out").mkdir()
    assert annotate([tmp_path / "a.txt"], tmp_path / "out", "bytes").rows == 1


def test_the_second_of_two_at_once_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs.txt").write_text("theirs")
    out = tmp_path / "corpora" / "out"
    with pytest.raises(CorpusError, match="holds a corpus already"), staged_folder(out) as mine:
        annotate([tmp_path / "theirs.txt"], out, "bytes")
        (mine / "manifest.json").write_text("mine")
    assert Corpus.open(out).lengths.tolist() == [6]
    assert names(out.parent) == ["out"]


def test_others_may_read_it(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        with staged_folder(tmp_path / "out") as folder:
            (folder / "manifest.json").touch()
    finally:
        os.umask(before)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o755
    assert names(tmp_path / "out") == ["manifest.json"]


def test_through_a_symbolic_link(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "corpus")
    for _ in range(2):
        annotate([tmp_path / "a.txt"], tmp_path / "link", "bytes", overwrite=True)
        assert names(tmp_path / "disk") == ["corpus"]
        assert (tmp_path / "link").is_symlink()


def test_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(CorpusError, match=r"out: cannot be written \(.*\)"):
        annotate([tmp_path / "a.txt"], tmp_path / "a.txt" / "out", "bytes")
