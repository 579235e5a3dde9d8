"""Inputs on other file systems, and globs: as local ones, or refused in one line."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flexray.datasets.annotate import annotate
from flexray.datasets.corpus import Corpus
from flexray.datasets.errors import CorpusError
from flexray.datasets.sources import find_sources


def texts(corpus: Corpus) -> list[str]:
    return [bytes(corpus.tokens(row).tolist()).decode() for row in range(corpus.rows)]


def table_bytes(kind: str, values: list[str]) -> bytes:
    table, raw = pa.table({"text": values}), io.BytesIO()
    if kind == "parquet":
        pq.write_table(table, raw, row_group_size=2)
        return raw.getvalue()
    with (pa.ipc.new_file if kind == "file" else pa.ipc.new_stream)(raw, table.schema) as sink:
        sink.write_table(table, max_chunksize=2)
    return raw.getvalue()


@pytest.fixture
def memory() -> Iterator[fsspec.AbstractFileSystem]:
    """A remote file system in this process."""
    remote = fsspec.filesystem("memory")
    files = {
        "a.txt": b"text",
        "b.jsonl": b'{"text": "line 1"}\n{"text": "line 2"}\n',
        "sub/c.parquet": table_bytes("parquet", ["p1", "p2", "p3"]),
        "sub/d.arrow": table_bytes("file", ["f1", "f2", "f3"]),
        "sub/e.arrow": table_bytes("stream", ["s1", "s2", "s3"]),
        "sub/.hidden.txt": b"no",
        ".hidden/f.txt": b"no",
    }
    for name, content in files.items():
        remote.pipe(f"/bucket/data/{name}", content)
    yield remote
    remote.rm("/bucket", recursive=True)


ALL = ["text", "line 1", "line 2", "p1", "p2", "p3", "f1", "f2", "f3", "s1", "s2", "s3"]


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        (["memory://bucket/data"], ALL),
        (["memory://bucket/data/"], ALL),
        (["memory://bucket/data/a.txt", "memory://bucket/data/b.jsonl"], ALL[:3]),
        (["memory://bucket/data/sub/*.arrow"], ALL[6:]),
        (["memory://bucket/data/*/[cd].*"], ALL[3:9]),
        (["memory://bucket/data/**/*.parquet"], ALL[3:6]),
        (["memory://bucket/d*/b.jsonl"], ALL[1:3]),
        (["memory://bucket/data/**"], ALL),
        (["memory://bucket/d*"], ALL),
        (["memory://bucket/data/.hidden/*.txt"], ["no"]),
    ],
)
def test_another_file_system(tmp_path: Path, inputs: list[str], expected: list[str]) -> None:
    assert texts(annotate(inputs, tmp_path / "out", "bytes")) == expected


def test_local_globs_and_file_urls(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt", "sub/c.txt", "x[1].txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    for given, names in (
        ("*.txt", ["a.txt", "b.txt", "x[1].txt"]),
        ("[ab].txt", ["a.txt", "b.txt"]),
        ("**/c.txt", ["sub/c.txt"]),
        ("**", ["a.txt", "b.txt", "sub/c.txt", "x[1].txt"]),
        ("s*", ["sub/c.txt"]),
        ("?.txt", ["a.txt", "b.txt"]),
        ("x[1].txt", ["x[1].txt"]),  # a file of that name comes before a pattern
        ("sub", ["sub/c.txt"]),
    ):
        assert [s.name for s in find_sources([tmp_path / given])] == [
            f"{tmp_path}/{name}" for name in names
        ]
    corpus = annotate([f"file://{tmp_path}/a.txt"], tmp_path / "out", "bytes")
    assert texts(corpus) == ["a.txt"]


def test_save_to_disk_on_another_file_system(tmp_path: Path) -> None:
    remote = fsspec.filesystem("memory")
    remote.pipe("/saved/train/data-0.arrow", table_bytes("stream", ["kept"]))
    remote.pipe("/saved/train/cache-1.arrow", table_bytes("stream", ["stale"]))
    remote.pipe("/saved/train/dataset_info.json", b"{}")
    state = json.dumps({"_data_files": [{"filename": "data-0.arrow"}]})
    remote.pipe("/saved/train/state.json", state.encode())
    remote.pipe("/saved/dataset_dict.json", b'{"splits": ["train"]}')
    assert texts(annotate(["memory://saved"], tmp_path / "out", "bytes")) == ["kept"]
    remote.rm("/saved", recursive=True)


def refusal(tmp_path: Path, *inputs: str) -> str:
    with pytest.raises(CorpusError) as caught:
        annotate(inputs, tmp_path / "out", "bytes")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())
    return str(caught.value)


@pytest.mark.usefixtures("memory")
def test_what_is_not_there(tmp_path: Path) -> None:
    for url in ("memory://bucket/none.txt", "memory://nowhere/a.jsonl"):
        assert refusal(tmp_path, url) == f"{url}: no such file or folder"
    assert refusal(tmp_path, "memory://bucket/*.md") == "memory://bucket/*.md: no file matches"
    none = str(tmp_path / "*.md")
    assert refusal(tmp_path, none) == f"{none}: no file matches"


def test_where_there_is_no_way_to(tmp_path: Path) -> None:
    assert refusal(tmp_path, "nope://a/b").startswith("nope://a/b: cannot be read (Protocol not")
    # Nothing listens on port 9.
    message = refusal(tmp_path, "http://127.0.0.1:9/a.jsonl")
    assert message.startswith("http://127.0.0.1:9/a.jsonl: ")


def test_errors_name_the_url_and_the_line(
    tmp_path: Path, memory: fsspec.AbstractFileSystem
) -> None:
    memory.pipe("/bucket/bad.jsonl", b'{"text": "a"}\n{"text"\n')
    url = "memory://bucket/bad.jsonl"
    assert refusal(tmp_path, url).startswith(f"{url}:2: broken JSON")
    memory.pipe("/bucket/bad.parquet", b"PAR1 and no more")
    url = "memory://bucket/bad.parquet"
    assert refusal(tmp_path, url).startswith(f"{url}: cannot be read as parquet")
    memory.pipe("/bucket/bad.txt", b"\xff")
    assert refusal(tmp_path, "memory://bucket/bad.txt").startswith("memory://bucket/bad.txt: not")


def test_secrets_in_a_url_are_not_told(tmp_path: Path) -> None:
    message = refusal(tmp_path, "nope://name:secret@host/a.txt?token=secret")
    assert message.startswith("nope://host/a.txt: cannot be read")
    assert "secret" not in message
