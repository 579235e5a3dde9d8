"""The order of what a run works through, and where the sampler stood at each step."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest

from flexray.batches import batches
from flexray.config import load_config
from flexray.datasets.annotate import annotate
from flexray.datasets.data_source import DataSource
from flexray.datasets.errors import CorpusError


def train(**keys):
    sections = {"train": {"steps": 4, "batch_sequences": 2} | keys, "data": {"validation": 3}}
    return load_config(sections, []).train


@pytest.fixture(scope="module")
def held_out(five_texts):
    """Five rows, three of them held out."""
    return dataclasses.replace(five_texts, validation=3).open()


def shape(work):
    return [(b.step, "held out" if b.held_out else "train", len(b.rows), b.ends_step) for b in work]


def test_held_out_rows_come_every_so_many_steps_and_after_the_last(held_out):
    assert shape(batches(held_out, train(validate_every=3))) == [
        (1, "train", 2, True),
        (2, "train", 2, True),
        (3, "train", 2, False),
        (3, "held out", 2, False),
        (3, "held out", 1, True),
        (4, "train", 2, False),
        (4, "held out", 2, False),
        (4, "held out", 1, True),
    ]
    assert [s for s, kind, *_ in shape(batches(held_out, train())) if kind != "train"] == [4, 4]


def test_rows_are_either_trained_on_or_held_out_and_counted(held_out):
    work = list(batches(held_out, train(validate_every=1)))
    trained, looked = (
        {row for b in work if b.held_out == which for row in b.rows} for which in (False, True)
    )
    assert len(trained) == 2 and len(looked) == 3 and trained | looked == set(range(5))
    for batch in work:
        assert batch.lengths == tuple(held_out.lengths[list(batch.rows)])
        assert batch.label_tokens == sum(batch.lengths) - len(batch.rows)


def test_held_out_rows_are_batched_by_tokens_where_the_others_are(held_out):
    sizes = train(batch_tokens=130, batch_sequences=None)
    parts = [b for b in batches(held_out, sizes) if b.held_out and b.step == 4]
    assert sum(len(b.rows) for b in parts) == 3
    assert all(sum(b.lengths) <= 130 or len(b.rows) == 1 for b in parts)


@pytest.mark.parametrize("budget", [1, 100, 127, 128, 129, 1000, 10**6])
@pytest.mark.parametrize("rows", [1, 2, 300])
def test_parts_of_held_out_rows_are_as_full_as_the_next_row_lets_them(tmp_path, rows, budget):
    texts = ["x" * (1 + i * 37 % 128) for i in range(rows + 1)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    annotate([tmp_path / "a.jsonl"], tmp_path / "out", "bytes")
    documents = DataSource((tmp_path / "out",), 400, "error", validation=rows).open()
    sizes = train(batch_tokens=budget, batch_sequences=None, steps=1)
    parts = [b for b in batches(documents, sizes) if b.held_out]
    assert [row for b in parts for row in b.rows] == documents.validation_rows.tolist()
    assert [b.ends_step for b in parts] == [False] * (len(parts) - 1) + [True]
    for part in parts:
        assert sum(part.lengths) <= budget or len(part.rows) == 1
    for part, after in itertools.pairwise(parts):
        assert sum(part.lengths) + after.lengths[0] > budget


def test_held_out_rows_are_found_when_they_are_looked_at(five_texts):
    """Of millions, a start should not wait for the parts of all."""
    documents = dataclasses.replace(five_texts, validation=3).open()
    work = batches(documents, train(validate_every=2))
    assert next(work).step == 1
    assert "validation_rows" not in vars(documents)
    assert next(work).step == 2
    assert "validation_rows" in vars(documents)


def test_without_held_out_rows_there_is_no_validation(five_texts):
    assert not any(b.held_out for b in batches(five_texts.open(), train(validate_every=1)))


@pytest.mark.parametrize("done", [0, 1, 2, 3, 4])
def test_after_a_resume_the_rest_is_the_same(five_texts, done):
    documents = five_texts.open()
    whole = list(batches(documents, train()))
    cursor = whole[done - 1].cursor if done else None
    assert list(batches(documents, train(), done=done, cursor=cursor)) == whole[done:]


def test_a_cursor_of_other_rows_is_refused_at_once(five_texts, held_out):
    (first, *_) = batches(held_out, train())
    with pytest.raises(CorpusError, match="the sampler was saved with"):
        batches(five_texts.open(), train(), done=1, cursor=first.cursor)
