"""Remakes the figures of docs/data-figures.md: opening, reading, sampling, tokenising.

    python -m flexray.jobs.benchmark_data --quick                             seconds
    python -m flexray.jobs.benchmark_data --document docs/data-figures.md     minutes, 4 GB of disk

The corpora are synthetic: rows of a few tokens, since opening costs by the row, not by the token.
They are written with the project's own writer, measured in fresh processes, and deleted.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, TypeVar
from unittest.mock import patch

import numpy as np
import typer

from flexray.datasets import writer
from flexray.datasets.corpus import Corpus
from flexray.datasets.documents import Documents, OverLength
from flexray.datasets.sampler import Sampler, Stream
from flexray.datasets.tokenizer import BytesTokenizer
from flexray.errors import UserError

SHORT, LONG = 7, 64  # 99 of 100 rows have 1 to 7 tokens, the others 8 to 64
TEMP = Path(tempfile.gettempdir())
LONG_ROWS = 1024  # in a record batch, where rows have 4,096 tokens
BYTES_A_ROW = 40  # on disk, at most
MiB = 1 << 20

T = TypeVar("T")
Table = list[Sequence[str]]


def main(
    rows: Annotated[
        list[int] | None,
        typer.Option(
            help="Rows of a corpus; may be given more than once.", show_default="1, 10, 100 million"
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option(help="One corpus of 300,000 rows by default, and nothing is tokenised.")
    ] = False,
    folder: Annotated[Path, typer.Option(help="Where the corpora are made and deleted.")] = TEMP,
    document: Annotated[
        Path | None, typer.Option(help="docs/data-figures.md: its figures are replaced.")
    ] = None,
) -> None:
    """Measure what data costs: opening corpora, reading rows, drawing batches."""
    load = os.getloadavg()[0]
    sizes = sorted(rows or ([300_000] if quick else [10**6, 10**7, 10**8]))
    opening: Table = [
        ("rows", "rows a record batch", "on disk", "cold", "again", "peak memory", "kept memory")
    ]
    views: Table = [("rows", "policy", "documents", "time", "peak memory", "kept memory")]
    reading: Table = [("rows", "policy", "reads a second", "99% under", "private memory")]
    for count in sizes:
        with synthetic(folder, count, writer.BATCH_ROWS) as corpus:
            opening.append(_opening_row(corpus, count, writer.BATCH_ROWS))
            for max_length, policy in VIEWS:
                views.append(apart(view_row, corpus, max_length, policy))
            for max_length, policy in (VIEWS[0], VIEWS[-1]):
                reading.append(apart(reading_row, corpus, max_length, policy))
    for count in (count for count in sizes if count <= 10**7):
        with synthetic(folder, count, LONG_ROWS) as corpus:
            opening.append(_opening_row(corpus, count, LONG_ROWS))
    sections = [
        f"*On {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}; "
        f"load of the machine when it began: {load:.1f}.*\n",
        _section("Opening a corpus", opening),
        _section("Applying an over-length policy, lengths and label counts", views),
        _section("Reading rows at random", reading),
        _section("Drawing batches of 512 sequences", sampling(sizes[-1])),
    ]
    if not quick:
        sections.append(_section("Tokenising text", tokenising()))
    text = "\n".join(sections)
    typer.echo(text)
    if document:
        # Here, not above: the processes that are measured need no planner.
        from flexray.jobs.planner_report import fill

        fill(document, text)


VIEWS: tuple[tuple[int, OverLength], ...] = (
    (LONG, "error"),  # touches no row
    (SHORT, "drop"),  # one in a hundred
    (SHORT, "split"),
    (3, "drop"),  # more than half of them
    (3, "truncate"),
    (3, "split"),
)


@contextmanager
def synthetic(folder: Path, rows: int, batch_rows: int) -> Iterator[Path]:
    """A corpus for a while."""
    free = shutil.disk_usage(folder).free
    if free < 2 * rows * BYTES_A_ROW:
        raise UserError(f"{folder}: {rows:,} rows need {rows * BYTES_A_ROW:,} bytes and more")
    with tempfile.TemporaryDirectory(dir=folder, prefix="flexray-data-") as place:
        draw = np.random.default_rng(0)
        # Batches of few rows are what corpora of long rows have.
        with patch.object(writer, "BATCH_ROWS", batch_rows):
            made = writer.CorpusWriter(Path(place), BytesTokenizer().info, 256)
            for start in range(0, rows, batch_rows):
                count = min(batch_rows, rows - start)
                lengths = draw.integers(1, SHORT + 1, count)
                long = draw.random(count) < 0.01
                lengths[long] = draw.integers(SHORT + 1, LONG + 1, long.sum())
                made.add(lengths, np.zeros(lengths.sum(), np.int32))
            made.finish()
        yield Path(place)


def apart(measure: Callable[..., T], *arguments: object) -> T:
    """Runs `measure` in a process of its own, so that memory is its own."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(measure, *arguments).result()


def _memory(name: str) -> int:
    """A line of /proc/self/status in bytes: VmHWM is the peak, RssAnon what is no mapped file."""
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"{name}:\s+(\d+) kB", status)
    return int(found[1]) * 1024 if found else 0


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def opened(path: Path) -> tuple[float, int, int]:
    """Seconds to open a corpus, peak and kept bytes."""
    _reset_peak()
    before, began = _memory("VmRSS"), time.perf_counter()
    corpus = Corpus.open(path)
    took = time.perf_counter() - began
    assert corpus.rows
    return took, _memory("VmHWM") - before, _memory("VmRSS") - before


def reopened(path: Path) -> float:
    """Seconds, the median of three."""
    return sorted(opened(path)[0] for _ in range(3))[1]


def _opening_row(path: Path, rows: int, batch_rows: int) -> Sequence[str]:
    files = list(path.iterdir())
    for file in files:  # out of the page cache, which keeps what is not on disk yet
        with file.open("rb") as stored:
            os.fsync(stored.fileno())
            os.posix_fadvise(stored.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    cold, peak, kept = apart(opened, path)
    warm = apart(reopened, path)
    size = sum(file.stat().st_size for file in files)
    return (
        f"{rows:,}",
        f"{batch_rows:,}",
        f"{size / MiB:,.0f} MiB",
        f"{cold:.2f} s",
        f"{warm:.2f} s",
        f"{peak / MiB:,.0f} MiB",
        f"{kept / MiB:,.0f} MiB",
    )


def view_row(path: Path, max_length: int, policy: OverLength) -> Sequence[str]:
    """A policy on an opened corpus, with all that the driver wants to know."""
    corpus = Corpus.open(path)
    _reset_peak()
    before, began = _memory("VmRSS"), time.perf_counter()
    view = Documents(corpus, max_length, policy)
    assert len(view.lengths) == len(view.label_tokens) == view.rows
    took = time.perf_counter() - began
    return (
        f"{corpus.rows:,}",
        f"{policy} over {max_length}: {_touched(corpus, max_length):.0%} of the rows",
        f"{view.rows:,}",
        f"{took:.2f} s",
        f"{(_memory('VmHWM') - before) / MiB:,.0f} MiB",
        f"{(_memory('VmRSS') - before) / MiB:,.0f} MiB",
    )


def _touched(corpus: Corpus, max_length: int) -> float:
    return float((corpus.lengths > max_length).mean())


def reading_row(path: Path, max_length: int, policy: OverLength) -> Sequence[str]:
    """Random rows of a view, each read once."""
    view = Documents(Corpus.open(path), max_length, policy)
    rows = np.random.default_rng(0).integers(0, view.rows, min(200_000, view.rows)).tolist()
    view.read(0)
    before, times = _memory("RssAnon"), np.empty(len(rows))
    began = time.perf_counter()
    for i, row in enumerate(rows):
        start = time.perf_counter()
        view.read(row)[0].sum()
        times[i] = time.perf_counter() - start
    took = time.perf_counter() - began
    return (
        f"{view.corpus.rows:,}",
        f"{policy} over {max_length}: {_touched(view.corpus, max_length):.0%} of the rows",
        f"{len(rows) / took:,.0f}",
        f"{np.percentile(times, 99) * 1e6:.0f} µs",
        f"{(_memory('RssAnon') - before - times.nbytes) / MiB:,.0f} MiB",
    )


def sampling(rows: int) -> Table:
    """Draws a second of each kind of sampler."""
    lengths = np.random.default_rng(0).integers(1, 4096, min(rows, 10**7), dtype=np.int32)
    budget = 512 * int(lengths.mean())
    three = [
        Stream(rows, weight=6),
        Stream(rows // 10, rows // 1000, 3),
        Stream(rows // 100, weight=1),
    ]
    samplers = {
        f"one corpus of {rows:,} rows": Sampler([Stream(rows)], 0, batch_sequences=512),
        "three corpora by weight": Sampler(three, 0, batch_sequences=512),
        f"one corpus of {len(lengths):,} rows, batches by tokens": Sampler(
            [Stream(len(lengths))], 0, batch_tokens=budget, lengths=lengths
        ),
    }
    table: Table = [("what", "a batch", "sequences a second")]
    for name, sampler in samplers.items():
        began = time.perf_counter()
        dealt = sum(len(sampler.next()) for _ in range(100))
        took = time.perf_counter() - began
        table.append((name, f"{took / 100 * 1e3:.2f} ms", f"{dealt / took:,.0f}"))
    return table


def tokenising() -> Table:
    """`annotate` against the tokenizer's own library on the same cores."""
    from flexray.jobs.data_annotate import annotate_throughput

    table: Table = [("what", "tokens", "tokens a second", "of `encode_batch`")]
    for row in annotate_throughput():
        speed = float(row["tokens_per_second"])
        table.append(
            (str(row["what"]), f"{row['tokens']:,}", f"{speed:,.0f}", f"{row['ratio']:.2f}")
        )
    return table


def _section(title: str, rows: Table) -> str:
    head, *body = rows
    lines = (head, ["---"] * len(head), *body)
    return "\n".join([f"### {title}", "", *("| " + " | ".join(r) + " |" for r in lines), ""])


if __name__ == "__main__":
    typer.run(main)
