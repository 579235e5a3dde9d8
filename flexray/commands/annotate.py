"""`flexray annotate`: makes a corpus from text or token ids."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from flexray.datasets.annotate import Progress as AnnotateProgress
    from flexray.datasets.corpus import Corpus


def annotate(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT",
            show_default=False,
            help="Files or folders, paths or URLs (s3://, gs://, hf://, https://, ...), or globs. "
            ".jsonl, .parquet and .arrow files hold a document a row; any other file is one "
            "document of plain text. Text and JSON lines may be compressed (.gz, .bz2, .zst, "
            ".lz4). Folders are walked in sorted order, hidden names left out.",
        ),
    ],
    out: Annotated[
        Path, typer.Option(metavar="DIR", show_default=False, help="Folder to make the corpus in.")
    ],
    tokenizer: Annotated[
        str,
        typer.Option(
            metavar="bytes|NAME_OR_PATH",
            show_default=False,
            help="'bytes' (the 256 UTF-8 bytes, no special tokens), a folder or file with a "
            "Hugging Face tokenizer.json, or a model name on the Hugging Face Hub. For token ids: "
            "the tokenizer that made them.",
        ),
    ],
    text_column: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Column with the text.", show_default="text"),
    ] = None,
    tokens_column: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Column with lists of token ids, instead of text. A column `labels` beside it "
            "holds lists of as many, -100 where nothing is to be learned; or `loss_mask`, "
            "`completion_mask` or `assistant_masks` hold 1 where something is, else 0.",
            show_default="input_ids, where there are neither text nor messages",
        ),
    ] = None,
    chat_column: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Column with chats, lists of messages with role and content, instead of text. "
            "The tokenizer's chat template renders them, and only what the assistant says is "
            "learned. A column `tools` beside it is given to the template.",
            show_default="messages, where there is no text",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Ray tasks at once, at most; 1: none, all is done in this process.",
            show_default="as many as CPUs, or 1 for less than 128 MiB",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the corpus that DIR holds already.")
    ] = False,
) -> None:
    """Make a corpus: tokenise documents and record the length of each.

    The corpus is a folder of Arrow files with a manifest.json: `data.corpus` of a training config
    names it. Every document is a sequence of its own. It is not cut here: `data.max_length` and
    `data.over_length` decide that when training starts. What is left out (empty documents, null
    rows, chats in which the assistant says nothing) is counted and shown.

    Examples:

      flexray annotate books/ --tokenizer bytes --out corpora/books

      flexray annotate s3://bucket/web/*.jsonl.gz --tokenizer Qwen/Qwen3-0.6B --out web

      flexray annotate chats.parquet --chat-column messages --tokenizer ./my-model --out chats

      flexray annotate shards/*.parquet --tokens-column input_ids --tokenizer ./my-model --out ids

    Large inputs are cut into pieces that Ray tasks share (RAY_ADDRESS names a cluster); the corpus
    is the same whoever makes it. DIR appears when everything is written, or not at all: after an
    interruption, the same command goes on with the pieces that are finished.
    """
    from functools import partial

    from flexray.annotation import run_pieces
    from flexray.datasets.annotate import annotate as make_corpus

    try:
        with _Bar() as bar:
            corpus = make_corpus(
                inputs,
                out,
                tokenizer,
                text_column=text_column,
                tokens_column=tokens_column,
                chat_column=chat_column,
                overwrite=overwrite,
                progress=bar.show,
                run=partial(run_pieces, workers=workers),
            )
    except KeyboardInterrupt:
        typer.echo("Stopped; the same command goes on with the pieces that are finished.", err=True)
        raise
    _summarise(corpus, out)


class _Bar:
    """Progress on stderr, so that stdout holds only the summary."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("annotating"),
            BarColumn(),
            DownloadColumn(),
            TextColumn("{task.fields[rows]:,} rows  {task.fields[tokens]:,} tokens"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=None, rows=0, tokens=0)

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, at: AnnotateProgress) -> None:
        self._progress.update(
            self._task,
            completed=at.bytes_read,
            total=at.bytes_total,
            rows=at.rows,
            tokens=at.tokens,
        )


def _summarise(corpus: Corpus, out: Path) -> None:
    import numpy as np
    from rich.console import Console
    from rich.table import Table

    manifest = corpus.manifest
    quantiles = np.percentile(corpus.lengths, [0, 50, 90, 99, 100], method="nearest")
    lengths = zip(("shortest", "median", "90%", "99%", "longest"), quantiles, strict=True)
    dropped = (f"{rows:,} {why}" for why, rows in manifest.dropped.items())
    table = Table(box=None, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("corpus", str(out))
    table.add_row("tokenizer", f"{manifest.tokenizer.name}, vocabulary {manifest.vocab_size:,}")
    table.add_row("rows", f"{manifest.rows:,}")
    table.add_row("tokens", f"{manifest.tokens:,} ({manifest.label_tokens:,} of them labels)")
    table.add_row("tokens a row", ", ".join(f"{name} {value:,}" for name, value in lengths))
    table.add_row("left out", ", ".join(dropped) or "nothing")
    Console(highlight=False).print(table)
