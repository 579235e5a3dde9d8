"""`flexray annotate` as a user runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from flexray.datasets.corpus import Corpus


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flexray", "annotate", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", "COLUMNS": "200", "HOME": str(cwd)},
    )


def test_makes_a_corpus_and_says_what_is_in_it(tmp_path: Path) -> None:
    lines = "".join(f'{{"body": "{"x" * n}"}}\n' for n in [0, *range(1, 102)])
    (tmp_path / "in.jsonl").write_text(lines + '{"body": null}\n')
    arguments = ("in.jsonl", "--tokenizer", "bytes", "--text-column", "body", "--out", "out")
    result = run(*arguments, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    for needle in (
        "bytes, vocabulary 256",
        "5,151 (5,050 of them labels)",
        "shortest 1, median 51, 90% 91, 99% 100, longest 101",
        "1 empty, 1 null",
    ):
        assert needle in result.stdout
    assert Corpus.open(tmp_path / "out").lengths.tolist() == list(range(1, 102))

    again = run(*arguments, cwd=tmp_path)
    assert again.returncode == 2
    assert "out: holds a corpus already" in again.stderr
    assert "Traceback" not in again.stderr
    assert run(*arguments, "--overwrite", cwd=tmp_path).returncode == 0


def test_token_ids(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"ids": [1, 2]}\n{"ids": [3]}\n')
    arguments = ("in.jsonl", "--tokenizer", "bytes", "--tokens-column", "ids", "--out", "out")
    result = run(*arguments, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "nothing" in result.stdout
    assert Corpus.open(tmp_path / "out").tokens(0).tolist() == [1, 2]


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n{"text"\n')
    result = run("in.jsonl", "--tokenizer", "bytes", "--out", "out", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: in.jsonl:2: broken JSON")
    assert result.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir() if path.name != "in.jsonl"] == []


def test_ctrl_c_keeps_what_is_finished(tmp_path: Path) -> None:
    lines = [f'{{"text": "{"x" * 90}"}}' for _ in range(20)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    interrupted = """
import os, signal
from flexray.commands import annotate
from flexray.datasets import pieces
pieces.SMALLEST = pieces.LARGEST = 500
def show(self, at):
    if at.rows > 10:
        os.kill(os.getpid(), signal.SIGINT)
annotate._Bar.show = show
from flexray.__main__ import main
main()
"""
    arguments = ("annotate", "in.jsonl", "--tokenizer", "bytes", "--out", "out")
    result = subprocess.run(
        [sys.executable, "-c", interrupted, *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 130
    assert "goes on with the pieces that are finished" in result.stderr
    assert "Traceback" not in result.stderr
    (staging,) = tmp_path.glob(".out.partial-*")
    assert list(staging.glob("part-*.json"))
    assert run(*arguments[1:], cwd=tmp_path).returncode == 0
    assert Corpus.open(tmp_path / "out").lengths.tolist() == [90] * 20
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out"]


def test_a_url(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("text")
    arguments = ("--tokenizer", "bytes", "--out", "out")
    assert run(f"file://{tmp_path}/in.txt", *arguments, cwd=tmp_path).returncode == 0
    result = run("nope://bucket/in.txt", "--tokenizer", "bytes", "--out", "other", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith("error: nope://bucket/in.txt: cannot be read (")
    assert result.stderr.count("\n") == 1


def test_help_loads_neither_ray_nor_torch() -> None:
    code = (
        "import sys, flexray.commands.annotate;"
        "sys.exit(bool({'ray', 'torch', 'pyarrow'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_help_names_every_option(tmp_path: Path) -> None:
    text = run("--help", cwd=tmp_path).stdout
    options = ("--out", "--tokenizer", "--text-column", "--tokens-column", "--chat-column")
    for needle in (*options, "--workers", "--overwrite", "Examples", ".parquet", "s3://"):
        assert needle in text
