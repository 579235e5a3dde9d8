"""What `annotate` refuses: one clear line, and no output."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flexray.datasets.annotate import annotate
from flexray.datasets.errors import CorpusError


def fails(source: Path, *needles: str, **options: Any) -> None:
    out = source.parent / "out"
    with pytest.raises(CorpusError) as caught:
        annotate([source], out, "bytes", **options)
    message = str(caught.value)
    assert "\n" not in message
    for needle in needles:
        assert needle in message
    assert sorted(p.name for p in source.parent.iterdir()) == [source.name]


def written(tmp_path: Path, name: str, content: bytes) -> Path:
    path = tmp_path / name
    path.write_bytes(content)
    return path


def ids_file(tmp_path: Path, values: Any, kind: pa.DataType | None = None) -> Path:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"input_ids": pa.array(values, kind)}), path)
    return path


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    path = written(tmp_path, "a.txt", b"abc\xffdef")
    fails(path, str(path), "not UTF-8", "0xff", "offset 3")


def test_json_line_that_is_broken(tmp_path: Path) -> None:
    path = written(tmp_path, "a.jsonl", b'{"text": "a"}\n\n{"text": "b"\n{"text": "c"}\n')
    fails(path, f"{path}:3", "broken JSON")


def test_json_line_that_is_not_utf8(tmp_path: Path) -> None:
    path = written(tmp_path, "a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n')
    fails(path, f"{path}:2", "not UTF-8")


def test_json_text_with_half_a_character(tmp_path: Path) -> None:
    path = written(tmp_path, "a.jsonl", b'{"text": "fine"}\n{"text": "\\ud83d"}\n')
    fails(path, f"{path}:2", "valid Unicode")


@pytest.mark.parametrize("value", [b"1", b"[1]", b"true", b'{"a": 1}'])
def test_json_text_that_is_not_text(tmp_path: Path, value: bytes) -> None:
    path = written(tmp_path, "a.jsonl", b'{"text": "a"}\n{"text": ' + value + b"}\n")
    fails(path, f"{path}:2", "is not text")


@pytest.mark.parametrize(
    "value", [b'"abc"', b"[1.5]", b"[[1]]", b'["a"]', b"7", b"[1e30]", b"[true]"]
)
def test_json_ids_that_are_not_ids(tmp_path: Path, value: bytes) -> None:
    path = written(tmp_path, "a.jsonl", b'{"ids": [1]}\n{"ids": ' + value + b"}\n")
    fails(path, f"{path}:2", "is not a list of token ids", tokens_column="ids")


def test_json_line_that_is_not_an_object(tmp_path: Path) -> None:
    path = written(tmp_path, "a.jsonl", b'{"text": "a"}\n"b"\n')
    fails(path, f"{path}:2", "not a JSON object")


def test_json_line_without_the_column(tmp_path: Path) -> None:
    path = written(tmp_path, "a.jsonl", b'{"text": "a"}\n{"id": 1, "body": "b"}\n')
    fails(path, f"{path}:2", "no column 'text'", "it has id, body")


def test_one_json_array(tmp_path: Path) -> None:
    fails(written(tmp_path, "a.json", b'[{"text": "a"}]'), "one JSON array", "one object a line")


def test_table_without_the_column(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": [1], "body": ["b"]}), path)
    fails(path, str(path), "no column 'text', 'messages' or 'input_ids'", "it has id, body")
    fails(path, "no column 'content'", "it has id, body", text_column="content")


def test_column_named_for_plain_text(tmp_path: Path) -> None:
    fails(written(tmp_path, "README.md", b"a"), "plain text", "'body'", text_column="body")


def test_text_column_that_holds_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [1, 2]}), path)
    fails(path, str(path), "int64, not text")


def test_table_text_that_is_not_utf8(tmp_path: Path) -> None:
    values = pa.array([b"fine", None, b"\xff"]).view(pa.string())
    path = tmp_path / "a.arrow"
    with pa.ipc.new_file(path, pa.schema({"text": pa.string()})) as file:
        file.write(pa.record_batch({"text": values}))
    fails(path, f"{path}: row 2", "not UTF-8")


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([[1], None, [5, 256]], None),
        ([[1], [], [-1]], None),
        ([[1], [3], [2**64 - 1]], pa.list_(pa.uint64())),
    ],
)
def test_token_ids_outside_the_vocabulary(tmp_path: Path, values: Any, kind: Any) -> None:
    path = ids_file(tmp_path, values, kind)
    fails(path, f"{path}: row 2", f"token id {values[2][-1]} ", "vocabulary of 256", "bytes")


def test_json_ids_outside_the_vocabulary(tmp_path: Path) -> None:
    path = written(tmp_path, "a.jsonl", b'{"input_ids": [1]}\n\n{"input_ids": [300]}\n')
    fails(path, f"{path}:3", "token id 300")


def test_null_token_id(tmp_path: Path) -> None:
    path = ids_file(tmp_path, [[1, 2], [3, None]])
    fails(path, f"{path}: row 1", "a token id is null")


@pytest.mark.parametrize("values", [[[1.0]], [["a"]], [1], ["abc"], [[[1]]]])
def test_ids_that_are_not_lists_of_integers(tmp_path: Path, values: Any) -> None:
    fails(ids_file(tmp_path, values), "not token ids", tokens_column="input_ids")


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.feather"])
@pytest.mark.parametrize("content", [b"", b"PAR1", b"ARROW1\0\0", b"not a table" * 100])
def test_broken_tables(tmp_path: Path, name: str, content: bytes) -> None:
    path = written(tmp_path, name, content)
    fails(path, str(path), "cannot be read as")


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "s.arrow"])
def test_tables_cut_short(tmp_path: Path, name: str) -> None:
    table = pa.table({"text": ["some text"] * 1000})
    path = tmp_path / name
    if name == "a.parquet":
        pq.write_table(table, path)
    else:
        make = pa.ipc.new_stream if name == "s.arrow" else pa.ipc.new_file
        with make(path, table.schema) as file:
            file.write_table(table, max_chunksize=100)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    fails(path, str(path), "cannot be read as")


def test_gzip_cut_short(tmp_path: Path) -> None:
    raw = gzip.compress(b'{"text": "abc"}\n' * 10_000)
    path = written(tmp_path, "a.jsonl.gz", raw[: len(raw) // 2])
    fails(path, str(path), "cannot be read as jsonl")


def test_empty_inputs(tmp_path: Path) -> None:
    fails(written(tmp_path, "a.jsonl", b"\n\n"), "no sequence with a token")
    (tmp_path / "a.jsonl").unlink()
    path = ids_file(tmp_path, [[], None, []], pa.list_(pa.int32()))
    fails(path, "no sequence with a token", "2 empty, 1 null")


def test_nothing_to_read(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    fails(folder, str(folder), "holds no files")
    folder.rmdir()
    with pytest.raises(CorpusError, match="no such file or folder"):
        annotate([folder], tmp_path / "out", "bytes")
    with pytest.raises(CorpusError, match="no input given"):
        annotate([], tmp_path / "out", "bytes")
    assert not list(tmp_path.iterdir())


def test_text_and_tokens_column_at_once(tmp_path: Path) -> None:
    path = ids_file(tmp_path, [[1]])
    fails(path, "not several", text_column="a", tokens_column="b")


def test_a_corpus_as_input(tmp_path: Path) -> None:
    annotate([written(tmp_path, "a.txt", b"a")], tmp_path / "corpus", "bytes")
    with pytest.raises(CorpusError, match="is a corpus already"):
        annotate([tmp_path / "corpus"], tmp_path / "out", "bytes")


def test_unreadable_state_of_save_to_disk(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text('{"_data_files": [{"filename": "gone.arrow"}]}')
    fails(folder, "gone.arrow", "no such file")
    (folder / "state.json").write_text("{}")
    fails(folder, "state.json")
