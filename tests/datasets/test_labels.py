"""Labels beside token ids: kept, or refused in one line; never passed over."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flexray.datasets import parts, writer
from flexray.datasets.annotate import annotate
from flexray.datasets.corpus import Corpus
from flexray.datasets.errors import CorpusError

Record = dict[str, Any]
RECORDS: list[Record] = [
    {"input_ids": [1, 2, 3, 4], "labels": [-100, -100, 3, 4]},
    {"input_ids": [], "labels": []},
    {"input_ids": None, "labels": [9]},
    {"input_ids": [5, 6], "labels": [5, 6]},
    {"input_ids": None, "labels": None},
    {"input_ids": [7, 8], "labels": [-100, -100]},
]


def write_jsonl(path: Path, records: list[Record]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def write_parquet(path: Path, records: list[Record]) -> None:
    pq.write_table(pa.Table.from_pylist(records), path, row_group_size=2)


def write_arrow(path: Path, records: list[Record]) -> None:
    # Other columns lie between, and labels come first.
    table = pa.Table.from_pylist([{"labels": r.get("labels"), "id": 0, **r} for r in records])
    with pa.ipc.new_stream(path, table.schema) as stream:
        stream.write_table(table, max_chunksize=2)


formats = pytest.mark.parametrize(
    ("name", "write"),
    [("a.jsonl", write_jsonl), ("a.parquet", write_parquet), ("a.arrow", write_arrow)],
    ids=["jsonl", "parquet", "arrow"],
)
Write = Callable[[Path, list[Record]], None]


def labels(corpus: Corpus) -> list[list[int]]:
    assert corpus.has_labels
    found = [corpus.labels(row) for row in range(corpus.rows)]
    return [row.tolist() for row in found if row is not None]


def refusal(folder: Path, *inputs: Path, **options: Any) -> str:
    with pytest.raises(CorpusError) as caught:
        annotate(inputs, folder / "out", "bytes", **options)
    assert not (folder / "out").exists()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@formats
def test_labels_are_kept(tmp_path: Path, name: str, write: Write) -> None:
    write(tmp_path / name, RECORDS)
    corpus = annotate([tmp_path / name], tmp_path / "out", "bytes")
    assert [corpus.tokens(row).tolist() for row in range(3)] == [[1, 2, 3, 4], [5, 6], [7, 8]]
    assert labels(corpus) == [[-100, -100, 3, 4], [5, 6], [-100, -100]]
    # The first label of a row is never predicted.
    assert corpus.label_tokens.tolist() == [2, 1, 0]
    assert corpus.manifest.label_tokens == 3
    assert corpus.manifest.dropped == {"empty": 1, "null": 2}


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.int64()),
        pa.list_(pa.int8()),
        pa.large_list(pa.int32()),
        pa.list_(pa.int32(), 2),
        pa.list_view(pa.int32()),
    ],
    ids=str,
)
def test_labels_however_they_are_stored(tmp_path: Path, kind: pa.DataType) -> None:
    ids = pa.array([[1, 2], None, [3, 4]], pa.list_(pa.uint8()))
    table = pa.table({"input_ids": ids, "labels": pa.array([[-100, 2], [9, 9], [3, 4]], kind)})
    with pa.ipc.new_stream(tmp_path / "a.arrow", table.schema) as stream:
        stream.write_table(table)
    assert labels(annotate([tmp_path / "a.arrow"], tmp_path / "out", "bytes")) == [
        [-100, 2],
        [3, 4],
    ]


def test_unsigned_and_dictionary_encoded_labels(tmp_path: Path) -> None:
    flat = pa.array([5, 9, 5], pa.uint8()).dictionary_encode()
    marks = pa.ListArray.from_arrays(pa.array([0, 1, 3], pa.int32()), flat)
    table = pa.table({"input_ids": pa.array([[5], [9, 5]]), "labels": marks})
    with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as file:
        file.write_table(table)
    corpus = annotate([tmp_path / "a.arrow"], tmp_path / "out", "bytes")
    assert labels(corpus) == [[5], [9, 5]]


@formats
def test_labels_across_blocks_batches_and_files(
    tmp_path: Path, name: str, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limits only, lowered."""
    for module, limit, value in (
        (parts, "SLICE_ROWS", 7),
        (writer, "BATCH_TOKENS", 50),
        (writer, "FILE_TOKENS", 200),
    ):
        monkeypatch.setattr(module, limit, value)
    records = [
        {"input_ids": list(range(n % 9)), "labels": [-100, *range(1, n % 9)][: n % 9]}
        for n in range(200)
    ]
    write(tmp_path / name, records)
    corpus = annotate([tmp_path / name], tmp_path / "out", "bytes")
    assert labels(corpus) == [record["labels"] for record in records if record["input_ids"]]
    assert len(corpus.manifest.files) > 2


@formats
@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"input_ids": [1, 2], "labels": [1]}, "1 labels for 2 token ids"),
        ({"input_ids": [1, 2], "labels": []}, "0 labels for 2 token ids"),
        ({"input_ids": [1, 2], "labels": None}, "token ids without labels"),
        ({"input_ids": [1, 2], "labels": [1, 256]}, "label 256 is outside the vocabulary of 256"),
        ({"input_ids": [1, 2], "labels": [-1, 2]}, "label -1 is outside the vocabulary of 256"),
        ({"input_ids": [1, 2], "labels": [1, None]}, "a label is null"),
    ],
)
def test_labels_that_do_not_belong_to_their_ids(
    tmp_path: Path, name: str, write: Write, bad: Record, says: str
) -> None:
    path = tmp_path / name
    # The null row shifts what is left: the message names the row of the input.
    write(path, [RECORDS[0], RECORDS[2], bad, RECORDS[3]])
    where = f"{path}:3" if name == "a.jsonl" else f"{path}: row 2"
    assert refusal(tmp_path, path).startswith(f"{where}: {says}")


@formats
@pytest.mark.parametrize("value", [1, "positive", [0.5]])
def test_labels_of_another_kind(tmp_path: Path, name: str, write: Write, value: Any) -> None:
    write(tmp_path / name, [{"input_ids": [1], "labels": value}])
    assert "labels" in refusal(tmp_path, tmp_path / name)


MASKS = ["loss_mask", "completion_mask", "assistant_masks"]


@formats
@pytest.mark.parametrize("mask", MASKS)
def test_masks_say_what_is_learned(tmp_path: Path, name: str, write: Write, mask: str) -> None:
    records: list[Record] = [
        {"ids": [1, 2, 3], mask: [1, 0, 1]},
        {"ids": None, mask: [1]},
        {"ids": [4], mask: [0]},
        {"ids": [], mask: []},
        {"ids": [0, 6], mask: [1, 1]},
    ]
    if name == "a.arrow":
        with pa.ipc.new_stream(tmp_path / name, pa.Table.from_pylist(records).schema) as stream:
            stream.write_table(pa.Table.from_pylist(records), max_chunksize=2)
    else:
        write(tmp_path / name, records)
    corpus = annotate([tmp_path / name], tmp_path / "out", "bytes", tokens_column="ids")
    assert labels(corpus) == [[1, -100, 3], [-100], [0, 6]]
    assert corpus.label_tokens.tolist() == [1, 0, 1]
    assert corpus.manifest.dropped == {"empty": 1, "null": 1}


@pytest.mark.parametrize(
    "mask",
    [
        pa.array([[True, False], [True]]),
        pa.array([[1, 0], [1]], pa.large_list(pa.uint8())),
        pa.array([[1, 0], [1]], pa.list_view(pa.int64())),
        pa.DictionaryArray.from_arrays(pa.array([1, 0]), pa.array([[1], [1, 0]])),
        pa.ListArray.from_arrays(
            pa.array([0, 2, 3], pa.int32()), pa.array([1, 0, 1], pa.int16()).dictionary_encode()
        ),
    ],
    ids=["flags", "large list", "list view", "dictionary of lists", "list of dictionary"],
)
def test_masks_however_they_are_stored(tmp_path: Path, mask: pa.Array) -> None:
    table = pa.table({"input_ids": pa.array([[1, 2], [3]]), "loss_mask": mask})
    with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as file:
        file.write_table(table)
    assert labels(annotate([tmp_path / "a.arrow"], tmp_path / "out", "bytes")) == [[1, -100], [3]]


def test_flags_in_json_lines(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"input_ids": [1, 2], "loss_mask": [False, True]}])
    assert labels(annotate([tmp_path / "a.jsonl"], tmp_path / "out", "bytes")) == [[-100, 2]]


@formats
@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ([1], "1 loss_mask values for 2 token ids"),
        ([1, 2], "loss_mask holds 2"),
        ([-1, 0], "loss_mask holds -1"),
        ([1, None], "a loss_mask value is null"),
        (None, "token ids without loss_mask"),
    ],
)
def test_masks_that_do_not_belong_to_their_ids(
    tmp_path: Path, name: str, write: Write, bad: Any, says: str
) -> None:
    path = tmp_path / name
    records = [{"input_ids": [1, 2], "loss_mask": mask} for mask in ([0, 1], [1, 1], bad)]
    records[1]["input_ids"] = None  # the null row shifts what is left
    if name == "a.arrow":
        with pa.ipc.new_file(path, pa.Table.from_pylist(records).schema) as file:
            file.write_table(pa.Table.from_pylist(records))
    else:
        write(path, records)
    where = f"{path}:3" if name == "a.jsonl" else f"{path}: row 2"
    assert refusal(tmp_path, path).startswith(f"{where}: {says}")


@pytest.mark.parametrize("beside", [("labels", "loss_mask"), ("loss_mask", "completion_mask")])
def test_two_that_say_what_is_learned_are_refused(tmp_path: Path, beside: tuple[str, str]) -> None:
    record = {"input_ids": [1, 2], **{name: [0, 1] for name in beside}}
    for name, write in (("a.jsonl", write_jsonl), ("a.parquet", write_parquet)):
        write(tmp_path / name, [record])
        message = refusal(tmp_path, tmp_path / name)
        assert f"both `{beside[0]}` and `{beside[1]}` say what is trained on; keep one" in message


def test_labels_or_a_mask_that_only_some_lines_have(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    plain, labelled = {"input_ids": [1, 2]}, {"input_ids": [1, 2], "labels": [-100, 2]}
    masked = {"input_ids": [1, 2], "loss_mask": [0, 1]}
    for records, says in (
        ([plain, labelled], "`labels`"),
        ([labelled, plain], "no labels"),
        ([plain, masked], "`loss_mask`"),
        ([labelled, masked], "`loss_mask`"),
    ):
        write_jsonl(path, records)
        assert refusal(tmp_path, path).startswith(f"{path}:2: {says}, unlike the first line")


def test_labels_that_only_some_inputs_have(tmp_path: Path) -> None:
    plain, labelled, text = (tmp_path / name for name in ("p.parquet", "l.parquet", "t.txt"))
    write_parquet(plain, [{"input_ids": [1, 2]}])
    write_parquet(labelled, RECORDS)
    text.write_text("text")
    for inputs in ((plain, labelled), (labelled, plain), (labelled, text), (text, labelled)):
        message = refusal(tmp_path, *inputs)
        assert message.startswith(str(inputs[1]))
        assert "unlike the input before" in message


def test_text_has_no_labels_unless_it_stands_for_labelled_ids(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_jsonl(path, [{"text": "a film", "labels": 1}])
    assert not annotate([path], tmp_path / "1", "bytes").has_labels
    write_jsonl(path, [{"text": "ab", "input_ids": [1, 2], "labels": [-100, 2]}])
    assert "name the text column or the tokens column" in refusal(tmp_path, path)
    assert not annotate([path], tmp_path / "2", "bytes", text_column="text").has_labels
    corpus = annotate([path], tmp_path / "3", "bytes", tokens_column="input_ids")
    assert labels(corpus) == [[-100, 2]]
