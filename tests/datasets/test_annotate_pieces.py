"""Inputs that are cut into pieces: the same corpus however it is made, and after whatever death."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models

from flexray.datasets import parts, pieces
from flexray.datasets.annotate import Progress, annotate, run_here
from flexray.datasets.columns import Column
from flexray.datasets.corpus import Corpus
from flexray.datasets.errors import CorpusError
from flexray.datasets.piece_writer import Advance, Job
from flexray.datasets.pieces import Piece
from flexray.datasets.readers import cut, read_rows
from flexray.datasets.sources import find_sources
from flexray.datasets.writer import Written

TEXTS = [f"document {i} " + "é" * (i % 23) for i in range(200)]


def write_jsonl(path: Path) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))


def write_parquet(path: Path) -> None:
    pq.write_table(pa.table({"text": TEXTS}), path, row_group_size=7)


def write_arrow_file(path: Path) -> None:
    table = pa.table({"text": TEXTS})
    with pa.ipc.new_file(path, table.schema) as file:
        file.write_table(table, max_chunksize=7)


def write_arrow_stream(path: Path) -> None:
    table = pa.table({"text": TEXTS})
    with pa.ipc.new_stream(path, table.schema) as stream:
        stream.write_table(table, max_chunksize=7)


Write = Callable[[Path], None]
FORMATS: list[tuple[str, Write]] = [
    ("a.jsonl", write_jsonl),
    ("a.parquet", write_parquet),
    ("a.arrow", write_arrow_file),
    ("stream.arrow", write_arrow_stream),
]
formats = pytest.mark.parametrize(("name", "write"), FORMATS, ids=[name for name, _ in FORMATS])


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "SMALLEST", 500)
    monkeypatch.setattr(pieces, "LARGEST", 500)


def texts(corpus: Corpus) -> list[str]:
    return [bytes(corpus.tokens(row).tolist()).decode() for row in range(corpus.rows)]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class Recorder:
    """Runs pieces in some order and remembers which; may fail at one."""

    def __init__(self, order: Callable[[list[Piece]], list[Piece]] = list, stop: int = -1) -> None:
        self._order, self._stop = order, stop
        self.ran: list[int] = []

    def __call__(self, job: Job, given: Sequence[Piece], advance: Advance) -> dict[int, Written]:
        written: dict[int, Written] = {}
        for piece in self._order(list(given)):
            if len(self.ran) == self._stop:
                raise KeyboardInterrupt
            written |= run_here(job, [piece], advance)
            self.ran.append(piece.index)
        return written


@formats
@pytest.mark.usefixtures("small_pieces")
def test_one_file_is_cut(tmp_path: Path, name: str, write: Write) -> None:
    write(tmp_path / name)
    recorder = Recorder()
    corpus = annotate([tmp_path / name], tmp_path / "out", "bytes", run=recorder)
    assert texts(corpus) == TEXTS
    assert recorder.ran == list(range(len(recorder.ran)))
    assert len(recorder.ran) > 8


@pytest.mark.usefixtures("small_pieces")
def test_the_order_of_work_does_not_matter(tmp_path: Path) -> None:
    for name, write in FORMATS:
        write(tmp_path / name)
    for i, text in enumerate(TEXTS):
        (tmp_path / f"{i}.txt").write_text(text)
    inputs = [tmp_path / name for name, _ in FORMATS] + sorted(tmp_path.glob("*.txt"))
    orders: list[Callable[[list[Piece]], list[Piece]]] = [
        list,
        lambda given: given[::-1],
        lambda given: random.Random(0).sample(given, len(given)),
    ]
    found = []
    for i, order in enumerate(orders):
        recorder = Recorder(order)
        annotate(inputs, tmp_path / "outs" / str(i), "bytes", run=recorder)
        found.append(contents(tmp_path / "outs" / str(i)))
    assert len(recorder.ran) > 40
    assert found[0] == found[1] == found[2]


@formats
def test_a_file_given_twice_in_a_row_is_read_twice(tmp_path: Path, name: str, write: Write) -> None:
    write(tmp_path / name)
    corpus = annotate([tmp_path / name] * 3, tmp_path / "out", "bytes")
    assert texts(corpus) == TEXTS * 3


def test_small_files_share_a_piece(tmp_path: Path) -> None:
    for i, text in enumerate(TEXTS):
        (tmp_path / f"{i}.txt").write_text(text)
    recorder = Recorder()
    annotate([tmp_path], tmp_path / "out", "bytes", run=recorder)
    assert recorder.ran == [0]


LINES = [
    b'{"text": "a"}\n',
    b"\n",
    '{"text": "é猫", "more": 1}\r\n'.encode(),
    b"   \n",
    b'{"text": null}\n',
    b'{"text": "b"}',
]


@pytest.mark.parametrize("content", [b"".join(LINES), b"".join(LINES) + b"\n", LINES[0] * 3])
def test_lines_are_read_once_wherever_a_file_is_cut(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    (source,) = find_sources([tmp_path / "a.jsonl"])
    lines = enumerate(content.split(b"\n"), start=1)
    expected = [
        (f"{source.name}:{number}", json.loads(line)["text"])
        for number, line in lines
        if line.strip()
    ]
    for most in range(1, len(content) + 2):
        found = []
        cuts = cut(source, Column(), most)
        assert sum(part.size for part in cuts) == len(content)
        for part in cuts:
            for rows in read_rows(part):
                names = [rows.where(i) for i in range(len(rows.values))]
                found += list(zip(names, rows.values.to_pylist(), strict=True))
                assert 0 <= rows.done <= part.size
        assert found == expected, most


@formats
def test_rows_have_the_file_s_numbers_wherever_it_is_cut(
    tmp_path: Path, name: str, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "SLICE_ROWS", 3)
    write(tmp_path / name)
    (source,) = find_sources([tmp_path / name])
    cuts = cut(source, Column(), 100)
    assert len(cuts) > 20
    assert sum(part.size for part in cuts) == source.size
    names = [rows.where(i) for p in cuts for rows in read_rows(p) for i in range(len(rows.values))]
    first, template = (1, "{}:{}") if name == "a.jsonl" else (0, "{}: row {}")
    assert names == [template.format(source.name, first + i) for i in range(len(TEXTS))]


@pytest.mark.usefixtures("small_pieces")
def test_a_broken_line_in_a_later_piece_is_named_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_jsonl(path)
    lines = path.read_bytes().split(b"\n")
    for bad, says in (
        (b'{"text": "a"', "broken JSON"),
        (b'{"text": "\xff"}', "not UTF-8 text"),
        (b'{"body": "a"}', "no column 'text'"),
        (b'{"text": 7}', "7 is not text"),
        (b"[]", "not a JSON object"),
    ):
        path.write_bytes(b"\n".join([*lines[:150], bad, *lines[150:]]))
        with pytest.raises(CorpusError) as caught:
            annotate([path], tmp_path / "out", "bytes")
        assert str(caught.value).startswith(f"{path}:151: {says}")


@pytest.mark.usefixtures("small_pieces")
def test_a_broken_row_group_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": TEXTS}), path, row_group_size=50, compression="zstd")
    raw = bytearray(path.read_bytes())
    third = pq.read_metadata(path).row_group(2).column(0)
    start = third.dictionary_page_offset or third.data_page_offset
    raw[start + 30 : start + 60] = b"x" * 30
    path.write_bytes(raw)
    with pytest.raises(CorpusError, match=r"a\.parquet: cannot be read as parquet \(.*\)$"):
        annotate([path], tmp_path / "out", "bytes")


@pytest.mark.usefixtures("small_pieces")
def test_finished_pieces_are_used_again(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_jsonl(path)
    expected = annotate([path], tmp_path / "whole", "bytes")
    first, second = Recorder(stop=5), Recorder()
    with pytest.raises(KeyboardInterrupt):
        annotate([path], tmp_path / "out", "bytes", run=first)
    assert first.ran == [0, 1, 2, 3, 4]
    assert not (tmp_path / "out").exists()

    seen: list[Progress] = []
    annotate([path], tmp_path / "out", "bytes", run=second, progress=seen.append)
    assert second.ran[0] == 5
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert (seen[-1].rows, seen[-1].tokens) == (expected.rows, expected.manifest.tokens)
    assert seen[-1].bytes_read == seen[-1].bytes_total == path.stat().st_size
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"a.jsonl", "whole", "out"}


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("change", ["content", "time", "column", "tokenizer", "code", "cut short"])
def test_what_would_be_written_otherwise_is_not_used(
    tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [{"text": text, "body": f"other {text}"} for text in TEXTS]
    one, two = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    for path in (one, two):
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    whole = Recorder()
    annotate([one, two], tmp_path / "whole", run=whole)
    total = len(whole.ran)
    out, options = tmp_path / "out", dict[str, Any]()
    # Finished are all pieces of the second file and some of the first.
    stopped = Recorder(lambda given: given[::-1], stop=total * 2 // 3)
    with pytest.raises(KeyboardInterrupt):
        annotate([one, two], out, run=stopped)
    finished = set(stopped.ran)
    of_two = set(range(total // 2, total))
    assert of_two < finished

    if change == "content":
        two.write_text(two.read_text() + '{"text": "new", "body": "new"}\n' * 30)
        lost = of_two
    elif change == "time":
        os.utime(two, ns=(0, 0))
        lost = of_two
    elif change == "column":
        options["text_column"] = "body"
        lost = finished
    elif change == "tokenizer":
        Tokenizer(models.WordLevel({"?": 0}, unk_token="?")).save(str(tmp_path / "t.json"))
        options["tokenizer"] = str(tmp_path / "t.json")
        lost = finished
    elif change == "code":
        moved = Path(shutil.copytree(Path(pieces.__file__).parent, tmp_path / "code"))
        with (moved / "values.py").open("a") as file:
            file.write("# changed\n")
        monkeypatch.setattr(pieces, "__file__", str(moved / "pieces.py"))
        lost = finished
    else:
        (staging,) = tmp_path.glob(".out.partial-*")
        last = max(staging.glob("part-*.arrow"))
        os.truncate(last, last.stat().st_size - 8)
        lost = {total - 1}
    again = Recorder()
    annotate([one, two], out, run=again, **options)
    ran = set(again.ran)
    if change == "content":
        assert max(ran) >= total
        ran -= set(range(total, max(ran) + 1))
    assert ran == set(range(total)) - finished | lost
    annotate([one, two], tmp_path / "fresh", **options)
    assert contents(out) == contents(tmp_path / "fresh")


KILLED = """
import sys
from flexray.datasets import pieces
from flexray.datasets.annotate import annotate
pieces.SMALLEST = pieces.LARGEST = 500
def stop(at):
    if at.rows >= 100:
        print("stopped", flush=True)
        sys.stdin.read()
annotate([sys.argv[1]], sys.argv[2], "bytes", progress=stop)
"""


@pytest.mark.usefixtures("small_pieces")
def test_sigkill_loses_only_the_piece_that_was_written(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl")
    out = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path / "a.jsonl"), str(out)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "stopped\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    recorder = Recorder()
    corpus = annotate([tmp_path / "a.jsonl"], out, "bytes", run=recorder)
    assert texts(corpus) == TEXTS
    total = len(list(out.glob("*.arrow")))
    assert 0 < len(recorder.ran) < total * 2 / 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "out"]


@pytest.mark.usefixtures("small_pieces")
def test_a_process_that_outlives_its_killed_driver_writes_nowhere(tmp_path: Path) -> None:
    """Ray's workers may write for some seconds more; the folder has another name by then."""
    write_jsonl(tmp_path / "a.jsonl")
    jobs: list[tuple[Job, Piece]] = []

    def die(job: Job, given: Sequence[Piece], advance: Advance) -> dict[int, Written]:
        run_here(job, given[:3], advance)
        jobs.append((job, given[3]))
        raise KeyboardInterrupt

    def late(job: Job, given: Sequence[Piece], advance: Advance) -> dict[int, Written]:
        with pytest.raises(OSError, match="No such file"):
            run_here(jobs[0][0], [jobs[0][1]], advance)
        return run_here(job, given, advance)

    with pytest.raises(KeyboardInterrupt):
        annotate([tmp_path / "a.jsonl"], tmp_path / "out", "bytes", run=die)
    corpus = annotate([tmp_path / "a.jsonl"], tmp_path / "out", "bytes", run=late)
    assert texts(corpus) == TEXTS
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "out"]
