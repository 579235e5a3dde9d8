"""`flexray inspect`: what is in a corpus."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer
from rich.bar import Bar
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flexray.datasets.builtin import builtin_corpus
from flexray.datasets.corpus import Corpus
from flexray.datasets.summary import Summary, describe, summarise
from flexray.datasets.tokenizer import load_tokenizer
from flexray.errors import UserError

_BAR = 14  # characters
_SHOWN = 32  # token ids of a row


def inspect(
    corpus: Annotated[
        str,
        typer.Argument(
            metavar="CORPUS",
            show_default=False,
            help="A folder made by `flexray annotate`, or 'builtin': Python's own source files.",
        ),
    ],
    longest: Annotated[
        int, typer.Option(metavar="N", min=0, help="How many of the longest rows to list.")
    ] = 5,
    row: Annotated[
        int | None,
        typer.Option(metavar="ID", help="Show the first tokens of this row, as text if possible."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the lengths: an .svg, .png or .pdf file."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="All of it as JSON on stdout, with every file.")
    ] = False,
) -> None:
    """Show what is in a corpus: how long its sequences are, and how it was made.

    Opening checks every file against the manifest: what is broken is one line on stderr, with
    exit code 2. Choose `data.max_length` by what is listed: the table says how many rows and which
    share of all tokens there are of each length.

    Examples:

      flexray inspect builtin

      flexray inspect corpora/books --plot lengths.svg

      flexray inspect corpora/chats --row 17

      flexray inspect corpora/books --json | jq .percentiles
    """
    if plot is not None and plot.suffix not in {".svg", ".png", ".pdf"}:
        raise UserError(f"--plot {plot}: give a file that ends in .svg, .png or .pdf")
    folder = builtin_corpus() if corpus == "builtin" else Path(corpus).expanduser()
    opened = Corpus.open(folder)
    if row is not None and not 0 <= row < opened.rows:
        raise UserError(f"--row {row}: {corpus} has the rows 0 to {opened.rows - 1}")
    summary = summarise(opened, longest)
    if plot is not None:
        _draw(opened, plot)
    if as_json:
        described = describe(opened, summary)
        if row is not None:
            described["row"] = _row(opened, row)
        typer.echo(json.dumps(described, indent=2))
        return
    console = Console(highlight=False)
    _show_manifest(opened, summary, console)
    _show_lengths(opened, summary, console)
    if summary.longest:
        _show_longest(summary, console)
    if row is not None:
        _show_row(_row(opened, row), console)


def _draw(corpus: Corpus, path: Path) -> None:
    from flexray.corpus_plot import draw_lengths

    title = f"{corpus.path.name}: {corpus.rows:,} rows, {corpus.manifest.tokens:,} tokens"
    try:
        draw_lengths(corpus.lengths, title, path)
    except OSError as error:
        raise UserError(f"--plot {path}: cannot be written: {error.strerror}") from None


def _show_manifest(corpus: Corpus, summary: Summary, console: Console) -> None:
    manifest, files = corpus.manifest, corpus.manifest.files
    names: dict[float, str] = {0: "shortest", 50: "median", 100: "longest"}
    percentiles = (f"{names.get(p, f'{p:g}%')} {n:,}" for p, n in summary.percentiles)
    left_out = [f"{rows:,} {why}" for why, rows in manifest.dropped.items()]
    empty = f", {summary.zero_length_rows:,} of them empty" if summary.zero_length_rows else ""
    table = Table(box=None, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("corpus", f"{escape(str(corpus.path))}, format {manifest.format_version}")
    table.add_row(
        "tokenizer",
        f"{escape(manifest.tokenizer.name)}, vocabulary {manifest.vocab_size:,}, "
        f"sha256 {manifest.tokenizer.sha256[:12]}",
    )
    if template := manifest.tokenizer.chat_template_sha256:
        table.add_row("chat template", f"sha256 {template[:12]}")
    table.add_row("rows", f"{manifest.rows:,}{empty}")
    table.add_row("tokens", f"{manifest.tokens:,}")
    table.add_row(
        "label tokens",
        f"{manifest.label_tokens:,}"
        + ("" if corpus.has_labels else ": every token but the first of a row"),
    )
    table.add_row("tokens a row", f"mean {summary.mean:,.1f}; " + ", ".join(percentiles))
    table.add_row("left out", escape(", ".join(left_out)) or "nothing")
    size = sum(file.bytes for file in files)
    table.add_row("files", f"{len(files):,}, {size:,} bytes")
    console.print(table)
    console.print()


def _show_lengths(corpus: Corpus, summary: Summary, console: Console) -> None:
    table = Table(box=None)
    for name in ("tokens", "rows", "of rows", "of tokens"):
        table.add_column(name, justify="right")
    table.add_column("rows")
    table.add_column("tokens")
    most_rows = max(bucket.rows for bucket in summary.histogram)
    most_tokens = max(bucket.tokens for bucket in summary.histogram)
    for bucket in summary.histogram:
        span = f"{bucket.low:,}" + (f" to {bucket.high:,}" if bucket.high > bucket.low else "")
        table.add_row(
            span,
            f"{bucket.rows:,}",
            f"{bucket.rows / corpus.rows:.1%}",
            f"{bucket.tokens / corpus.manifest.tokens:.1%}",
            Bar(most_rows, 0, bucket.rows, width=_BAR, color="magenta"),
            Bar(most_tokens, 0, bucket.tokens, width=_BAR, color="cyan"),
        )
    console.print(table)


def _show_longest(summary: Summary, console: Console) -> None:
    table = Table(box=None, title="\nThe longest rows", title_justify="left")
    for name in ("row", "tokens", "label tokens"):
        table.add_column(name, justify="right")
    for long in summary.longest:
        table.add_row(str(long.row), f"{long.length:,}", f"{long.label_tokens:,}")
    console.print(table)


def _row(corpus: Corpus, row: int) -> dict[str, Any]:
    ids = corpus.tokens(row)[:_SHOWN]
    return {
        "row": row,
        "length": int(corpus.lengths[row]),
        "label_tokens": int(corpus.label_tokens[row]),
        "first_ids": ids.tolist(),
        "first_text": _text(corpus, ids),
    }


def _text(corpus: Corpus, ids: npt.NDArray[np.int32]) -> str | None:
    """The ids as text; None where the tokenizer that made them is not on this machine."""
    made_by = corpus.manifest.tokenizer
    if made_by.name != "bytes" and not Path(made_by.name).expanduser().exists():
        return None
    tokenizer = load_tokenizer(made_by.name)
    return tokenizer.decode(ids) if tokenizer.info.sha256 == made_by.sha256 else None


def _show_row(row: dict[str, Any], console: Console) -> None:
    console.print(
        f"\nRow {row['row']}: {row['length']:,} tokens, {row['label_tokens']:,} of them labels"
    )
    console.print(f"first ids: {' '.join(map(str, row['first_ids']))}", markup=False)
    text = row["first_text"]
    shown = "the tokenizer is not on this machine" if text is None else repr(text)
    console.print(f"as text: {shown}", markup=False)
