"""The data benchmark: every figure is of a real corpus, which is gone afterwards."""

from __future__ import annotations

import numpy as np
import pytest

from flexray.datasets.corpus import Corpus
from flexray.errors import UserError
from flexray.jobs import benchmark_data
from flexray.jobs.planner_report import BEGIN, END


def test_figures_go_into_the_document(tmp_path, capsys, monkeypatch):
    views = benchmark_data.VIEWS
    monkeypatch.setattr(benchmark_data, "VIEWS", (views[0], views[-1]))  # each is a process
    document = tmp_path / "figures.md"
    document.write_text(f"before\n{BEGIN}\nstale\n{END}\nafter\n")
    benchmark_data.main(rows=[5_000], quick=True, folder=tmp_path, document=document)
    text = document.read_text()
    assert text.startswith(f"before\n{BEGIN}\n*On ") and text.endswith(f"{END}\nafter\n")
    assert "stale" not in text and capsys.readouterr().out.strip() in text
    opening, views, reading, sampling = text.split("### ")[1:]
    assert "| 5,000 | 65,536 |" in opening and "| 5,000 | 1,024 |" in opening
    for touched in ("error over 64: 0%", "split over 3: 5"):
        assert f"| 5,000 | {touched}" in views
    assert reading.count("| 5,000 |") == 2
    assert sampling.count("sequences a second") == 1 and "one corpus of 5,000 rows" in sampling
    assert [path.name for path in tmp_path.iterdir()] == ["figures.md"]


@pytest.mark.parametrize("batch_rows", [1024, 65_536])
def test_synthetic_corpora(tmp_path, batch_rows):
    with benchmark_data.synthetic(tmp_path, 5_000, batch_rows) as folder:
        corpus = Corpus.open(folder)
        assert corpus.rows == 5_000
        assert len(corpus._batches) == -(-5_000 // batch_rows)
        assert 0.005 < np.mean(corpus.lengths > benchmark_data.SHORT) < 0.015
        assert corpus.lengths.max() <= benchmark_data.LONG
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_one_line(tmp_path):
    with (
        pytest.raises(UserError, match=r"10,000,000,000,000 rows need 400,000,000,000,000 bytes"),
        benchmark_data.synthetic(tmp_path, 10**13, 1024),
    ):
        pass
