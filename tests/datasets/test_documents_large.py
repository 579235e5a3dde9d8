"""Views of corpora with more rows than one block of the index, and what they cost."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from flexray.datasets import documents
from flexray.datasets.corpus import Corpus
from flexray.datasets.documents import Documents, OverLength
from flexray.datasets.tokenizer import BytesTokenizer
from flexray.datasets.writer import IGNORED_LABEL, CorpusWriter

Fill = Callable[..., Corpus]


@pytest.fixture
def fill(tmp_path: Path) -> Fill:
    """A corpus with these lengths whose tokens count on from row to row, modulo 251."""

    def fill(lengths: np.ndarray, *, labelled: bool = False) -> Corpus:
        folder = tmp_path / "c"
        folder.mkdir()
        writer = CorpusWriter(folder, BytesTokenizer().info, 256)
        tokens = np.arange(lengths.sum()) % 251
        labels = np.where(tokens % 3, tokens, IGNORED_LABEL) if labelled else None
        writer.add(lengths, tokens, labels)
        writer.finish()
        return Corpus.open(folder)

    return fill


# All short; long rows here and there; blocks without any document; a block that becomes many.
LENGTHS = np.concatenate(
    [
        np.random.default_rng(0).integers(1, 9, 1100),
        np.random.default_rng(1).integers(1, 30, 2000),
        np.full(2500, 20),
        np.full(200, 4),
        np.full(1200, 100),
        np.full(700, 1),
    ]
)


@pytest.mark.parametrize("at_a_time", [1 << 18, 2048])
@pytest.mark.parametrize("labelled", [False, True])
@pytest.mark.parametrize("policy", ["drop", "truncate", "split"])
def test_every_document_of_many_blocks(
    fill: Fill,
    policy: OverLength,
    labelled: bool,
    at_a_time: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(documents, "_AT_A_TIME", at_a_time)
    corpus = fill(LENGTHS, labelled=labelled)
    view = Documents(corpus, 8, policy)
    starts = np.cumsum(LENGTHS) - LENGTHS
    wanted = [
        (start + at, min(8, length - at))
        for start, length in zip(starts.tolist(), LENGTHS.tolist(), strict=True)
        for at in range(0, length, 8)
        if length <= 8 or policy == "split" or (policy == "truncate" and at == 0)
    ]
    assert view.rows == len(wanted)
    assert view.lengths.tolist() == [length for _, length in wanted]
    learned = [
        sum(not labelled or (start + i) % 251 % 3 > 0 for i in range(1, length))
        for start, length in wanted
    ]
    assert view.label_tokens.tolist() == learned
    for row, (start, length) in enumerate(wanted):
        tokens, labels = view.read(row)
        assert (tokens[0], len(tokens)) == (start % 251, length)
        assert (labels is not None) == labelled
    assert view.report.lost_tokens == LENGTHS.sum() - sum(length for _, length in wanted)
    assert view.report.lost_label_tokens == corpus.label_tokens.sum() - sum(learned)


MEASURE = """
import contextlib, re, sys
from pathlib import Path
with contextlib.suppress(ImportError):
    import pandas  # where it is installed, pyarrow loads it when it is first asked for an array
from flexray.datasets.corpus import Corpus
from flexray.datasets.documents import Documents
def peak():  # the resource module's also counts the process that started this one
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10
before = peak()
corpus = Corpus.open(sys.argv[1])
opened = peak()
view = Documents(corpus, int(sys.argv[2]), sys.argv[3])
view.lengths, view.label_tokens
print(opened - before, peak() - opened)
"""


@pytest.mark.parametrize("labelled", [False, True])
def test_memory_is_four_bytes_a_row_and_count(fill: Fill, labelled: bool) -> None:
    """Peaks of a process, so that no intermediate hides; a view has 8 bytes a document.

    Without a `labels` column label counts follow from the lengths, and nobody who does not ask for
    them (no actor does) holds them.
    """
    rows, counts = 5_000_000, 2 if labelled else 1
    lengths = np.random.default_rng(0).integers(1, 5, rows)
    corpus = fill(lengths, labelled=labelled)
    policies = [
        (4, "error", rows * (2 - counts) / 2),  # no row is touched
        (3, "drop", (lengths <= 3).sum()),
        (2, "truncate", rows),
        (2, "split", (-(-lengths // 2)).sum()),
    ]
    for max_length, policy, documents_ in policies[: 2 if labelled else 4]:  # cut labels are read
        command = [sys.executable, "-c", MEASURE, str(corpus.path), str(max_length), policy]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        opening, viewing = map(int, done.stdout.split())
        assert rows * 4 * counts <= opening < rows * 4 * counts + 16e6
        assert viewing < documents_ * 8 + 35e6  # a stretch's temporaries do not grow with the rows
