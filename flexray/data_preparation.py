"""From the config's words about data to rows that are checked, and the order they come in."""

from __future__ import annotations

from pathlib import Path

from flexray.config import DataSection, TrainSection
from flexray.datasets.builtin import builtin_corpus
from flexray.datasets.data_source import DataSource
from flexray.datasets.mixture import Mixture
from flexray.datasets.sampler import Sampler
from flexray.errors import UserError


def data_source(data: DataSection) -> DataSource:
    """What every process of a run opens. Raises CorpusError if there is no built-in corpus."""
    held = data.validation
    return DataSource(
        corpora=tuple(_folder(share.corpus) for share in data.shares),
        max_length=data.max_length,
        over_length=data.over_length,
        weights=tuple(share.weight for share in data.shares),
        validation=_folder(held) if isinstance(held, str) else held or 0,
    )


def check_documents(documents: Mixture, vocab_size: int) -> None:
    """Raises UserError for rows that a model of this vocabulary cannot be trained on."""
    for part in documents.parts:
        corpus = part.corpus
        if corpus.vocab_size > vocab_size:
            raise UserError(
                f"{corpus.path}: token ids go up to {corpus.vocab_size - 1} and the model's "
                f"vocabulary has {vocab_size}: set model.config.vocab_size, or annotate with "
                "the model's tokenizer"
            )
        if not part.label_tokens.any():
            raise UserError(
                f"{corpus.path}: no sequence of up to {part.max_length} tokens has a token to "
                "predict: raise data.max_length or look at the corpus's labels"
            )


def make_sampler(documents: Mixture, train: TrainSection) -> Sampler:
    """The order in which `documents` are trained on, from its start."""
    if train.batch_tokens is None:
        size = train.batch_sequences
        return Sampler(documents.streams, train.seed, batch_sequences=size)
    return Sampler(
        documents.streams,
        train.seed,
        batch_tokens=train.batch_tokens,
        lengths=documents.lengths,
    )


def _folder(corpus: str) -> Path:
    path = builtin_corpus() if corpus == "builtin" else Path(corpus).expanduser()
    return path.absolute()
