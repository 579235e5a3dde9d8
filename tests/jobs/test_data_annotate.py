"""The throughput benchmark of `annotate`, on little text."""

from __future__ import annotations

import pytest

from flexray.datasets import pieces
from flexray.jobs.data_annotate import annotate_throughput


def test_all_ways_give_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="are one piece"):
        annotate_throughput(1)
    monkeypatch.setattr(pieces, "SMALLEST", 1 << 18)
    rows = annotate_throughput(1)
    assert len(rows) == 4
    assert len({row["tokens"] for row in rows}) == 1
    assert rows[0]["ratio"] == 1
    for row in rows:
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"])
        assert row["ratio"] == pytest.approx(rows[0]["seconds"] / row["seconds"])
