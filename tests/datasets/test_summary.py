from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexray.datasets import summary
from flexray.datasets.corpus import Corpus
from flexray.datasets.summary import Bucket, describe, summarise

WriteCorpus = Callable[..., Path]


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=60).filter(any),
    longest=st.integers(0, 70),
)
@settings(deadline=None, max_examples=60)
def test_against_the_plain_way(write_corpus: WriteCorpus, lengths: list[int], longest: int) -> None:
    with tempfile.TemporaryDirectory() as tmp:
        corpus = Corpus.open(write_corpus(Path(tmp) / "c", [[1] * n for n in lengths]))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(summary, "_AT_A_TIME", 7)
            found = summarise(corpus, longest)
    ranked = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))[:longest]
    assert [(r.row, r.length) for r in found.longest] == [(row, lengths[row]) for row in ranked]
    assert [r.label_tokens for r in found.longest] == [max(0, lengths[r] - 1) for r in ranked]
    for bucket in found.histogram:
        inside = [n for n in lengths if bucket.low <= n <= bucket.high]
        assert (bucket.rows, bucket.tokens) == (len(inside), sum(inside))
    assert sum(bucket.rows for bucket in found.histogram) == sum(n > 0 for n in lengths)
    assert found.zero_length_rows == lengths.count(0)
    assert found.mean == sum(lengths) / len(lengths)
    percentiles = dict(found.percentiles)
    assert (percentiles[0], percentiles[100]) == (min(lengths), max(lengths))
    for percent, length in found.percentiles:
        assert length in lengths
        rank = sorted(lengths)[round(percent / 100 * (len(lengths) - 1))]
        assert abs(sorted(lengths).index(length) - sorted(lengths).index(rank)) <= 1


def test_buckets_are_powers_of_two_without_gaps(tmp_path: Path, write_corpus: WriteCorpus) -> None:
    corpus = Corpus.open(write_corpus(tmp_path / "c", [[1] * n for n in (2, 3, 16)]))
    assert summarise(corpus).histogram == (
        Bucket(2, 3, 2, 5),
        Bucket(4, 7, 0, 0),
        Bucket(8, 15, 0, 0),
        Bucket(16, 31, 1, 16),
    )


def test_description_is_plain_data(tmp_path: Path, write_corpus: WriteCorpus) -> None:
    corpus = Corpus.open(write_corpus(tmp_path / "c", [[1] * n for n in range(1, 11)]))
    described = json.loads(json.dumps(describe(corpus, summarise(corpus))))
    assert described["tokens"] == 55 == sum(file["tokens"] for file in described["files"])
    assert described["percentiles"]["50"] == np.percentile(range(1, 11), 50, method="nearest")
    assert described["longest"][0] == {"row": 9, "length": 10, "label_tokens": 9}
    assert described["tokenizer"]["name"] == "test"
