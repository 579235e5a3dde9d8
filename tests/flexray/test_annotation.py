"""Ray tasks write the same corpus as one process does, and fail as clearly."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray

from flexray.annotation import run_pieces
from flexray.datasets import pieces
from flexray.datasets.annotate import Progress, annotate
from flexray.datasets.corpus import Corpus
from flexray.datasets.errors import CorpusError

TEXTS = [f"document {i} " + "é" * (i % 23) for i in range(300)]
two_tasks = partial(run_pieces, workers=2)


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    context = ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield context.address_info["address"]
    ray.shutdown()


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "SMALLEST", 2000)
    monkeypatch.setattr(pieces, "LARGEST", 2000)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def write_lines(path: Path) -> list[str]:
    lines = [json.dumps({"text": text}) for text in TEXTS]
    path.write_text("\n".join(lines))
    return lines


@pytest.mark.usefixtures("cluster")
def test_tasks_write_what_one_process_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lines(tmp_path / "a.jsonl")
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "b.parquet", row_group_size=20)
    monkeypatch.chdir(tmp_path)  # tasks run elsewhere
    inputs = ["a.jsonl", "b.parquet"]
    seen: list[Progress] = []
    corpus = annotate(inputs, "tasks", run=two_tasks, progress=seen.append)
    annotate(inputs, "here")
    assert contents(tmp_path / "tasks") == contents(tmp_path / "here")
    assert len(corpus.manifest.files) > 5
    assert [p.bytes_read for p in seen] == sorted(p.bytes_read for p in seen)
    assert len(seen) == len(corpus.manifest.files)
    assert (seen[-1].rows, seen[-1].tokens) == (corpus.rows, corpus.manifest.tokens)
    assert seen[-1].bytes_read == seen[-1].bytes_total


@pytest.mark.usefixtures("cluster")
def test_of_several_errors_the_first_is_told(tmp_path: Path) -> None:
    """Also when a later one is found long before it."""
    slow, quick = tmp_path / "a.jsonl.gz", tmp_path / "b.jsonl"
    slow.write_bytes(gzip.compress(b'{"text": "a"}\n' * 300_000 + b'{"text"\n'))
    quick.write_text("\n".join(['{"text": "a"}', '{"text"', *write_lines(quick)]))
    with pytest.raises(CorpusError, match=rf"^{slow}:300001: broken JSON") as caught:
        annotate([slow, quick], tmp_path / "out", run=two_tasks)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


KILLED = """
import sys
from functools import partial
from flexray.annotation import run_pieces
from flexray.datasets import pieces
from flexray.datasets.annotate import annotate
pieces.SMALLEST = pieces.LARGEST = 2000
def stop(at):
    if at.rows >= 100:
        print("stopped", flush=True)
        sys.stdin.read()
annotate([sys.argv[1]], sys.argv[2], progress=stop, run=partial(run_pieces, workers=2))
"""


def test_a_killed_driver_loses_what_was_running(tmp_path: Path, cluster: str) -> None:
    write_lines(tmp_path / "a.jsonl")
    out = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path / "a.jsonl"), str(out)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "RAY_ADDRESS": cluster},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "stopped\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not out.exists()
    seen: list[Progress] = []
    annotate([tmp_path / "a.jsonl"], out, run=two_tasks, progress=seen.append)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "out"]
    annotate([tmp_path / "a.jsonl"], tmp_path / "here")
    assert contents(out) == contents(tmp_path / "here")
    # Finished pieces are counted at once, before any task runs.
    kept = [p for p in seen if p.rows >= 100]
    assert kept[0].rows < len(TEXTS)


def test_small_inputs_do_not_pay_for_ray(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    code = (
        "import sys\nfrom flexray.annotation import run_pieces\n"
        "from flexray.datasets.annotate import annotate\n"
        f"annotate([{str(tmp_path / 'a.txt')!r}], {str(tmp_path / 'out')!r}, run=run_pieces)\n"
        "sys.exit('ray' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert Corpus.open(tmp_path / "out").rows == 1


def test_a_cluster_that_does_not_answer(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl")
    result = subprocess.run(
        [
            sys.executable,
            "-c",
            "from flexray.datasets import pieces; pieces.SMALLEST = pieces.LARGEST = 2000\n"
            "from flexray.__main__ import main; main()",
            *("annotate", "a.jsonl", "--tokenizer", "bytes", "--out", "out", "--workers", "2"),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "RAY_ADDRESS": "127.0.0.1:9"},
    )
    assert result.returncode == 2
    assert result.stderr == "error: no Ray cluster answers at 127.0.0.1:9 (Connection refused)\n"
