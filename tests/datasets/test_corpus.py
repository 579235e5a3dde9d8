from __future__ import annotations

import json
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest

from flexray.datasets.corpus import Corpus
from flexray.datasets.errors import CorpusError

WriteCorpus = Callable[..., Path]

ROWS = [list(range(n, n + 1 + n % 11)) for n in range(40)]


@pytest.fixture
def folder(tmp_path: Path, write_corpus: WriteCorpus) -> Path:
    return write_corpus(tmp_path / "corpus", ROWS)


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def rewrite(path: Path, folder: Path, **columns: pa.Array) -> None:
    """Replace columns of a file and keep the manifest in step with its size."""
    table = pa.ipc.open_file(path).read_all()
    for name, values in columns.items():
        table = table.set_column(table.schema.get_field_index(name), name, values)
    with pa.ipc.new_file(path, table.schema) as file:
        file.write_table(table)
    size = path.stat().st_size

    def fix(manifest: dict[str, Any]) -> None:
        for entry in manifest["files"]:
            if entry["name"] == path.name:
                entry["bytes"] = size

    edit_manifest(folder, fix)


def fails(folder: Path, *needles: str) -> None:
    with pytest.raises(CorpusError) as caught:
        Corpus.open(folder)
    message = str(caught.value)
    assert "\n" not in message
    for needle in (str(folder), *needles):
        assert needle in message


@pytest.mark.parametrize("list_type", [pa.list_, pa.large_list])
def test_rows_come_back_by_id(
    tmp_path: Path, write_corpus: WriteCorpus, list_type: Callable[..., pa.DataType]
) -> None:
    corpus = Corpus.open(write_corpus(tmp_path / "c", ROWS, list_type=list_type))
    assert corpus.rows == len(ROWS)
    assert corpus.vocab_size == 1000
    assert corpus.lengths.tolist() == [len(row) for row in ROWS]
    assert corpus.label_tokens.tolist() == [len(row) - 1 for row in ROWS]
    for i in np.random.default_rng(0).permutation(len(ROWS)):
        assert corpus.tokens(i).tolist() == ROWS[i]
        assert corpus.labels(i) is None


def test_labels_come_back_by_id(tmp_path: Path, write_corpus: WriteCorpus) -> None:
    labels = [[-100 if i % 2 else token for i, token in enumerate(row)] for row in ROWS]
    corpus = Corpus.open(write_corpus(tmp_path / "c", ROWS, labels))
    assert corpus.has_labels
    for i, row in enumerate(labels):
        read = corpus.labels(i)
        assert read is not None
        assert read.tolist() == row
        assert corpus.label_tokens[i] == sum(x != -100 for x in row[1:])


@pytest.mark.parametrize("row", [-1, len(ROWS), np.int64(-len(ROWS))])
def test_row_ids_outside_the_corpus_raise(folder: Path, row: int) -> None:
    corpus = Corpus.open(folder)
    with pytest.raises(IndexError, match=f"row {row} .* 0 to {len(ROWS) - 1}"):
        corpus.tokens(row)


def test_pickles_by_path(folder: Path) -> None:
    corpus = Corpus.open(folder)
    corpus.tokens(0)
    data = pickle.dumps(corpus)
    assert len(data) < 1000
    assert pickle.loads(data).tokens(17).tolist() == ROWS[17]


def private_bytes() -> int:
    """Memory that is this process's own: pages of mapped files do not count."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) << 10  # type: ignore[index]


def test_tokens_are_views_of_the_mapped_file(tmp_path: Path, write_corpus: WriteCorpus) -> None:
    rows = [[7] * 2_000_000, [8] * 2_000_000, [9] * 100]
    corpus = Corpus.open(write_corpus(tmp_path / "c", rows, rows))
    before = psutil.Process().memory_info().rss
    path = str(tmp_path / "c" / "data-0.arrow")
    assert path not in {m.path for m in psutil.Process().memory_maps()}, "opening keeps none"
    tokens = corpus.tokens(2)
    assert tokens.tolist() == rows[2]
    assert not tokens.flags.writeable
    assert psutil.Process().memory_info().rss - before < 8_000_000
    assert path in {m.path for m in psutil.Process().memory_maps()}

    before = private_bytes()
    kept = [read(row) for row in range(3) for read in (corpus.tokens, corpus.labels)]
    assert sum(int(column.sum()) for column in kept if column is not None) == 2 * 30_000_900
    assert private_bytes() - before < 1_000_000, "32 MB are held, and none of it copied"
    assert corpus.tokens(0).base is not None
    assert np.shares_memory(corpus.tokens(0), corpus.tokens(0))


def test_no_folder(tmp_path: Path) -> None:
    fails(tmp_path / "nowhere", "no such corpus", "flexray annotate")


def test_folder_without_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    fails(folder, "no manifest.json")


def test_manifest_that_is_a_folder(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").mkdir()
    fails(folder, "manifest.json: cannot be read (Is a directory)")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"format_version": 1}'])
def test_broken_manifest(folder: Path, text: str) -> None:
    (folder / "manifest.json").write_text(text)
    fails(folder, "manifest.json", "annotate again")


def test_future_format(folder: Path) -> None:
    edit_manifest(folder, lambda m: m.update(format_version=2, tokenizer="changed meaning"))
    fails(folder, "corpus format 2", "reads format 1")


def test_missing_file(folder: Path) -> None:
    (folder / "data-2.arrow").unlink()
    fails(folder, "data-2.arrow", "missing")


@pytest.mark.parametrize("keep", [0, 100, -1])
def test_truncated_file(folder: Path, keep: int) -> None:
    path = folder / "data-1.arrow"
    path.write_bytes(path.read_bytes()[:keep])
    fails(folder, "data-1.arrow", "bytes where the manifest says")


def test_file_of_the_right_size_that_is_not_arrow(folder: Path) -> None:
    path = folder / "data-1.arrow"
    path.write_bytes(b"\0" * path.stat().st_size)
    fails(folder, "data-1.arrow", "cannot be used")


def test_files_that_changed_places(folder: Path) -> None:
    last = folder / "data-5.arrow"  # shorter than the others
    shutil.copy(last, folder / "data-0.arrow")
    edit_manifest(folder, lambda m: m["files"][0].update(bytes=last.stat().st_size))
    fails(folder, "data-0.arrow", "has 5 rows where the manifest says 7")


def test_file_with_more_rows_than_its_entry(folder: Path) -> None:
    shutil.copy(folder / "data-0.arrow", folder / "data-5.arrow")
    size = (folder / "data-0.arrow").stat().st_size
    edit_manifest(folder, lambda m: m["files"][5].update(bytes=size))
    fails(folder, "data-5.arrow", "more than the 5 rows of the manifest")


@pytest.mark.parametrize("name", ["rows", "tokens", "label_tokens"])
def test_manifest_that_does_not_add_up(folder: Path, name: str) -> None:
    edit_manifest(folder, lambda m: m.update({name: m[name] + 1}))
    fails(folder, "manifest.json", f"{name} but its files add up to")


@pytest.mark.parametrize("name", ["rows", "tokens", "label_tokens"])
def test_wrong_counts_of_a_file(folder: Path, name: str) -> None:
    def change(manifest: dict[str, Any]) -> None:
        manifest[name] += 1
        manifest["files"][3][name] += 1

    edit_manifest(folder, change)
    fails(folder, "data-3.arrow", name)


def test_lengths_that_are_not_token_counts(folder: Path) -> None:
    lengths = pa.array([len(row) + 1 for row in ROWS[:7]], pa.int32())
    rewrite(folder / "data-0.arrow", folder, length=lengths)
    fails(folder, "data-0.arrow")


def test_two_lengths_exchanged(folder: Path) -> None:
    """The sums stay right; only the list offsets can tell."""
    lengths = [len(row) for row in ROWS[:7]]
    lengths[0], lengths[6] = lengths[6], lengths[0]
    array = pa.array(lengths, pa.int32())
    labels = pa.array([n - 1 for n in lengths], pa.int32())
    rewrite(folder / "data-0.arrow", folder, length=array, label_tokens=labels)
    fails(folder, "data-0.arrow", "length differs from the number of input_ids")


def test_label_tokens_that_were_not_shifted(folder: Path) -> None:
    counts = pa.array([len(row) for row in ROWS[:7]], pa.int32())
    rewrite(folder / "data-0.arrow", folder, label_tokens=counts)
    fails(folder, "data-0.arrow", "label_tokens must be length - 1")


def test_nulls(folder: Path) -> None:
    ids = pa.array([None, *ROWS[1:7]], pa.list_(pa.int32()))
    rewrite(folder / "data-0.arrow", folder, input_ids=ids)
    fails(folder, "data-0.arrow", "without nulls")


def test_other_types(folder: Path) -> None:
    ids = pa.array(ROWS[:7], pa.list_(pa.float64()))
    rewrite(folder / "data-0.arrow", folder, input_ids=ids)
    fails(folder, "data-0.arrow", "lists of int32")


def test_labels_in_some_files_only(tmp_path: Path, write_corpus: WriteCorpus) -> None:
    folder = write_corpus(tmp_path / "c", ROWS)
    other = write_corpus(tmp_path / "labelled", ROWS, ROWS)
    shutil.copy(other / "data-0.arrow", folder / "data-0.arrow")
    size = (folder / "data-0.arrow").stat().st_size
    edit_manifest(folder, lambda m: m["files"][0].update(bytes=size))
    fails(folder, "only some of its files have labels")


def test_file_names_stay_inside_the_folder(folder: Path) -> None:
    edit_manifest(folder, lambda m: m["files"][0].update(name="../corpus/data-0.arrow"))
    fails(folder, "files.0.name")
