"""What `annotate` accepts, with real files of every kind."""

from __future__ import annotations

import bz2
import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from flexray.datasets import parts, piece_writer, writer
from flexray.datasets.annotate import Progress, annotate
from flexray.datasets.corpus import Corpus

TEXTS = ["one", "two words", "", "naïve café 猫\r\n", "x" * 500, "last"]
IDS = [[1, 2, 3], [], [255], [0] * 300, [7, 8]]


def documents(corpus: Corpus) -> list[list[int]]:
    return [corpus.tokens(row).tolist() for row in range(corpus.rows)]


def in_bytes(texts: Sequence[str]) -> list[list[int]]:
    return [list(text.encode()) for text in texts if text]


def write_jsonl(path: Path, records: Sequence[dict[str, Any]]) -> None:
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    compress = {".gz": gzip.compress, ".bz2": bz2.compress}.get(path.suffix, bytes)
    path.write_bytes(compress(text.encode()))


def write_arrow_file(path: Path, table: pa.Table) -> None:
    with pa.ipc.new_file(path, table.schema) as file:
        file.write_table(table, max_chunksize=2)


def write_arrow_stream(path: Path, table: pa.Table) -> None:
    with pa.ipc.new_stream(path, table.schema) as stream:
        stream.write_table(table, max_chunksize=2)


def write_feather(path: Path, table: pa.Table) -> None:
    feather.write_feather(table, str(path), compression="lz4", chunksize=2)


def write_parquet(path: Path, table: pa.Table) -> None:
    pq.write_table(table, path, row_group_size=2)


TABLES: list[tuple[str, Callable[[Path, pa.Table], None]]] = [
    ("t.parquet", write_parquet),
    ("t.arrow", write_arrow_file),
    ("stream.arrow", write_arrow_stream),
    ("t.feather", write_feather),
]
tables = pytest.mark.parametrize(("name", "write"), TABLES, ids=[name for name, _ in TABLES])


def test_plain_text_files(tmp_path: Path) -> None:
    inputs = []
    for i, (text, suffix) in enumerate(
        zip(TEXTS, ["txt", "md", "py", "", "c", "csv"], strict=True)
    ):
        inputs.append(tmp_path / f"{i}.{suffix}")
        inputs[-1].write_bytes(text.encode())
    inputs.append(tmp_path / "zipped.txt.gz")
    inputs[-1].write_bytes(gzip.compress(b"from gzip"))
    inputs.append(tmp_path / "marked.txt")
    inputs[-1].write_bytes(b"\xef\xbb\xbfafter the byte order mark")
    corpus = annotate(inputs, tmp_path / "out", "bytes")
    assert documents(corpus) == in_bytes([*TEXTS, "from gzip", "after the byte order mark"])
    assert corpus.manifest.dropped == {"empty": 1}


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.jsonl.gz", "a.jsonl.bz2", "a.json"])
def test_json_lines(tmp_path: Path, name: str) -> None:
    records = [{"id": i, "body": text} for i, text in enumerate(TEXTS)]
    write_jsonl(tmp_path / name, [*records, {"id": 99, "body": None}])
    corpus = annotate([tmp_path / name], tmp_path / "out", "bytes", text_column="body")
    assert documents(corpus) == in_bytes(TEXTS)
    assert corpus.manifest.dropped == {"empty": 1, "null": 1}


def test_json_lines_of_token_ids(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"input_ids": ids} for ids in [*IDS, None]])
    corpus = annotate([tmp_path / "a.jsonl"], tmp_path / "out", "bytes")
    assert documents(corpus) == [ids for ids in IDS if ids]
    assert corpus.manifest.dropped == {"empty": 1, "null": 1}


@tables
@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())],
    ids=str,
)
def test_tables_of_text(
    tmp_path: Path, name: str, write: Callable[[Path, pa.Table], None], kind: pa.DataType
) -> None:
    values = pa.array([*TEXTS[:3], None, *TEXTS[3:]]).cast(kind)
    write(tmp_path / name, pa.table({"other": range(7), "text": values, "blob": [b"\xff"] * 7}))
    corpus = annotate([tmp_path / name], tmp_path / "out", "bytes")
    assert documents(corpus) == in_bytes(TEXTS)
    assert corpus.manifest.dropped == {"empty": 1, "null": 1}


@tables
@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.int32()),
        pa.list_(pa.int64()),
        pa.list_(pa.uint8()),
        pa.large_list(pa.int32()),
        pa.large_list(pa.uint64()),
    ],
    ids=str,
)
def test_tables_of_token_ids(
    tmp_path: Path, name: str, write: Callable[[Path, pa.Table], None], kind: pa.DataType
) -> None:
    chunks = [pa.array([*IDS[:2], None], kind), pa.array([], kind), pa.array(IDS[2:], kind)]
    write(tmp_path / name, pa.table({"ids": pa.chunked_array(chunks)}))
    corpus = annotate([tmp_path / name], tmp_path / "out", "bytes", tokens_column="ids")
    assert documents(corpus) == [ids for ids in IDS if ids]
    assert corpus.manifest.dropped == {"empty": 1, "null": 1}


@pytest.mark.parametrize("write", [write_arrow_file, write_arrow_stream, write_parquet])
def test_dictionary_encoded_token_ids(
    tmp_path: Path, write: Callable[[Path, pa.Table], None]
) -> None:
    flat = pa.array([5, 9, 5, 5, 9]).dictionary_encode()
    ids = pa.ListArray.from_arrays(pa.array([0, 2, 5], pa.int32()), flat)
    write(tmp_path / "a.arrow", pa.table({"input_ids": ids}))
    path = tmp_path / "a.arrow"
    if write is write_parquet:
        path = path.rename(tmp_path / "a.parquet")
    assert documents(annotate([path], tmp_path / "out", "bytes")) == [[5, 9], [5, 5, 9]]


def test_dictionary_encoded_rows(tmp_path: Path) -> None:
    rows = pa.DictionaryArray.from_arrays(
        pa.array([1, 0, None, 1], pa.int32()), pa.array([[1, 2], [3]], pa.list_(pa.int32()))
    )
    write_arrow_file(tmp_path / "a.arrow", pa.table({"input_ids": rows}))
    corpus = annotate([tmp_path / "a.arrow"], tmp_path / "out", "bytes")
    assert documents(corpus) == [[3], [1, 2], [3]]
    assert corpus.manifest.dropped == {"null": 1}


def test_fixed_size_and_view_lists(tmp_path: Path) -> None:
    for name, kind in (("f", pa.list_(pa.int32(), 2)), ("v", pa.list_view(pa.int32()))):
        values = pa.array([[1, 2], None, [3, 4]], kind)
        write_arrow_stream(tmp_path / f"{name}.arrow", pa.table({"input_ids": values}))
    corpus = annotate([tmp_path / "f.arrow", tmp_path / "v.arrow"], tmp_path / "out", "bytes")
    assert documents(corpus) == [[1, 2], [3, 4]] * 2


def test_hidden_tokens_under_null_rows_stay_hidden(tmp_path: Path) -> None:
    """A null row may cover values that are not part of the data."""
    ids = pa.ListArray.from_arrays(
        pa.array([0, 1, 4, 5], pa.int32()),
        pa.array([1, 999999, 999999, 999999, 2], pa.int32()),
        mask=pa.array([False, True, False]),
    )
    write_arrow_file(tmp_path / "a.arrow", pa.table({"input_ids": ids}))
    corpus = annotate([tmp_path / "a.arrow"], tmp_path / "out", "bytes")
    assert documents(corpus) == [[1], [2]]


def test_text_column_wins_over_input_ids_unless_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"input_ids": [[1]], "text": ["a"]}), tmp_path / "a.parquet")
    assert documents(annotate([tmp_path / "a.parquet"], tmp_path / "1", "bytes")) == [[97]]
    corpus = annotate([tmp_path / "a.parquet"], tmp_path / "2", "bytes", tokens_column="input_ids")
    assert documents(corpus) == [[1]]


def test_folders_are_walked_in_sorted_order(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for name in ("b/2.txt", "b/1.txt", "a.txt", "c.txt", ".hidden/x.txt", ".hidden.txt"):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    write_jsonl(root / "b" / "3.jsonl", [{"text": "line 1"}, {"text": "line 2"}])
    (root / "config.json").write_text('{\n  "a": 1\n}')
    corpus = annotate([root, root / "a.txt"], tmp_path / "out", "bytes")
    order = ["a.txt", "c.txt", '{\n  "a": 1\n}', "b/1.txt", "b/2.txt", "line 1", "line 2", "a.txt"]
    assert documents(corpus) == in_bytes(order)


def test_hugging_face_save_to_disk_folder(tmp_path: Path) -> None:
    """As `datasets` 4 lays a DatasetDict out."""
    root = tmp_path / "saved"
    for split in ("train", "test"):
        (root / split).mkdir(parents=True)
        names = [f"data-{i:05d}-of-00002.arrow" for i in range(2)]
        for name in names:
            write_arrow_stream(root / split / name, pa.table({"text": [f"{split} {name}"]}))
        state = {"_data_files": [{"filename": n} for n in names], "_split": split}
        (root / split / "state.json").write_text(json.dumps(state))
        (root / split / "dataset_info.json").write_text("{}")
        write_arrow_stream(root / split / "cache-0.arrow", pa.table({"text": ["stale"]}))
    (root / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    corpus = annotate([root], tmp_path / "out", "bytes")
    names = [f"{s} data-0000{i}-of-00002.arrow" for s in ("test", "train") for i in range(2)]
    assert documents(corpus) == in_bytes(names)


def test_manifest_counts(tmp_path: Path) -> None:
    lengths = [1, 1, 2, 3, 4, 7, 8, 1000]
    pq.write_table(pa.table({"input_ids": [[0] * n for n in lengths]}), tmp_path / "a.parquet")
    manifest = annotate([tmp_path / "a.parquet"], tmp_path / "out", "bytes").manifest
    assert (manifest.rows, manifest.tokens) == (8, sum(lengths))
    assert manifest.label_tokens == sum(lengths) - 8
    assert [(b.low, b.high, b.rows) for b in manifest.length_histogram] == [
        (1, 1, 2),
        (2, 3, 2),
        (4, 7, 2),
        (8, 15, 1),
        (512, 1023, 1),
    ]
    assert manifest.tokenizer.name == "bytes"
    assert manifest.dropped == {}


def test_large_inputs_make_several_files_and_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limits only, lowered: every border is crossed many times."""
    monkeypatch.setattr(writer, "BATCH_TOKENS", 2_000)
    monkeypatch.setattr(writer, "BATCH_ROWS", 40)
    monkeypatch.setattr(writer, "FILE_TOKENS", 10_000)
    monkeypatch.setattr(writer, "_MAX_BATCH_TOKENS", 3_000)
    monkeypatch.setattr(parts, "SLICE_ROWS", 7)
    monkeypatch.setattr(parts, "SLICE_BYTES", 5_000)
    monkeypatch.setattr(piece_writer, "ENCODE_CHARACTERS", 1_000)
    monkeypatch.setattr(piece_writer, "ENCODE_TEXTS", 5)
    rng = np.random.default_rng(0)
    texts = ["t" * int(n) for n in rng.integers(0, 900, 200)]
    ids = [rng.integers(0, 256, int(n)).tolist() for n in rng.integers(0, 900, 200)]
    write_jsonl(tmp_path / "1.jsonl", [{"text": text} for text in texts])
    table = pa.table({"input_ids": ids})
    pq.write_table(table, tmp_path / "2.parquet")
    write_arrow_stream(tmp_path / "3.arrow", table)
    (tmp_path / "4.txt").write_text("end")
    inputs = [tmp_path / name for name in ("1.jsonl", "2.parquet", "3.arrow", "4.txt")]
    corpus = annotate(inputs, tmp_path / "out", "bytes")
    rows = [row for row in [*ids, *ids] if row]
    assert documents(corpus) == [*in_bytes(texts), *rows, *in_bytes(["end"])]
    assert len(corpus.manifest.files) > 10
    assert max(entry.tokens for entry in corpus.manifest.files) < 14_000


def test_row_longer_than_a_record_batch_can_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_MAX_BATCH_TOKENS", 10)
    (tmp_path / "a.txt").write_text("x" * 11)
    with pytest.raises(ValueError, match="11 tokens is longer than the 10"):
        annotate([tmp_path / "a.txt"], tmp_path / "out", "bytes")


def test_progress_ends_at_the_whole_input(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl.gz", [{"text": "abc"}] * 50_000)
    table = pa.table({"text": ["abc"] * 10_000})
    write_parquet(tmp_path / "b.parquet", table)
    write_arrow_stream(tmp_path / "c.arrow", table)
    write_arrow_file(tmp_path / "d.arrow", table)
    inputs = sorted(tmp_path.iterdir())
    seen: list[Progress] = []
    annotate(inputs, tmp_path / "out", "bytes", progress=seen.append)
    total = sum(path.stat().st_size for path in inputs)
    at = [p.bytes_read for p in seen]
    assert at == sorted(at)
    assert len(set(at)) > 20
    assert (seen[-1].bytes_read, seen[-1].bytes_total) == (total, total)
    assert (seen[-1].rows, seen[-1].tokens) == (80_000, 240_000)


def test_same_input_same_corpus(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    manifests = [annotate([tmp_path / "a.jsonl"], tmp_path / n, "bytes").manifest for n in "12"]
    assert manifests[0] == manifests[1]
    write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in reversed(TEXTS)])
    other = annotate([tmp_path / "a.jsonl"], tmp_path / "3", "bytes").manifest
    assert other.fingerprint != manifests[0].fingerprint


def test_text_and_token_ids_keep_the_order_of_the_input(tmp_path: Path) -> None:
    (tmp_path / "1.txt").write_text("first")
    pq.write_table(pa.table({"input_ids": [[1]]}), tmp_path / "2.parquet")
    (tmp_path / "3.txt").write_text("last")
    inputs = [tmp_path / name for name in ("1.txt", "2.parquet", "3.txt")]
    corpus = annotate(inputs, tmp_path / "out", "bytes")
    assert documents(corpus) == [list(b"first"), [1], list(b"last")]
