"""A corpus written with pyarrow alone, so that readers are not tested by the project's writer."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pytest

IGNORED = -100


def _label_tokens(row: Sequence[int], labels: Sequence[int] | None) -> int:
    return sum(label != IGNORED for label in (row if labels is None else labels)[1:])


def _write_corpus(
    folder: Path,
    rows: Sequence[Sequence[int]],
    labels: Sequence[Sequence[int]] | None = None,
    *,
    list_type: Callable[[pa.DataType], pa.DataType] = pa.list_,
    batch_rows: int = 3,
    file_rows: int = 7,
) -> Path:
    """Several files of several batches each; zero-length rows stay."""
    folder.mkdir(parents=True)
    counts = [_label_tokens(r, labels[i] if labels else None) for i, r in enumerate(rows)]
    table = pa.table(
        {
            "input_ids": pa.array(rows, list_type(pa.int32())),
            **({"labels": pa.array(labels, list_type(pa.int32()))} if labels else {}),
            "length": pa.array([len(r) for r in rows], pa.int32()),
            "label_tokens": pa.array(counts, pa.int32()),
        }
    )
    files = []
    for i, start in enumerate(range(0, len(rows), file_rows)):
        part = table.slice(start, file_rows)
        path = folder / f"data-{i}.arrow"
        with pa.ipc.new_file(path, part.schema) as file:
            for batch in part.to_batches(max_chunksize=batch_rows):
                file.write_batch(batch)
        files.append(
            {
                "name": path.name,
                "rows": part.num_rows,
                "tokens": sum(part["length"].to_pylist()),
                "label_tokens": sum(part["label_tokens"].to_pylist()),
                "bytes": path.stat().st_size,
                "sha256": "",
            }
        )
    manifest = {
        "format_version": 1,
        "tokenizer": {"name": "test", "sha256": ""},
        "vocab_size": 1000,
        **{key: sum(f[key] for f in files) for key in ("rows", "tokens", "label_tokens")},
        "length_histogram": [],
        "dropped": {},
        "files": files,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.fixture(scope="session")
def write_corpus() -> Callable[..., Path]:
    return _write_corpus
