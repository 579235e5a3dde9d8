"""All rows of a run: documents of one corpus or several, numbered through."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt

from flexray.datasets.corpus import Corpus
from flexray.datasets.documents import Documents
from flexray.datasets.errors import CorpusError
from flexray.datasets.proportions import RESOLUTION, dealt, whole_weights
from flexray.datasets.sampler import Stream


class Mixture:
    """Documents of the corpora that are trained on, and after them those of a validation corpus.

    A row id counts through all of them, so that the planner and the actors know one kind of row.
    Nothing is copied for a single corpus.

    Attributes:
        parts: the view of each corpus, the validation corpus last.
        streams: what of each training corpus the sampler deals, and its weight.
        rows: number of all documents, those for validation included.
    """

    def __init__(
        self,
        training: Sequence[Documents],
        weights: Sequence[float],
        validation: Documents | int = 0,
    ) -> None:
        """`validation`: a corpus, or so many sequences, taken from the corpora by weight.

        Raises:
            CorpusError: a corpus is given twice, has another tokenizer than the first one, or has
                not more sequences than are held out; or a weight is next to nothing.
        """
        corpus = validation if isinstance(validation, Documents) else None
        self.parts = (*training, corpus) if corpus else tuple(training)
        _check_alike(self.parts)
        whole = whole_weights(weights)
        for part, weight in zip(training, whole, strict=True):
            if not weight:
                raise CorpusError(
                    f"{part.corpus.path}: its weight is less than a millionth of all weights "
                    f"(1/{RESOLUTION:,}): raise it or leave the corpus out"
                )
        count = validation if isinstance(validation, int) else 0
        self.streams = tuple(
            Stream(part.rows, held_out, weight, _number(part.corpus))
            for part, weight, held_out in zip(training, whole, dealt(count, whole), strict=True)
        )
        for part, stream in zip(training, self.streams, strict=True):
            if stream.trained < 1:
                raise CorpusError(
                    f"{part.corpus.path}: has {stream.rows} sequences, and {stream.held_out} are "
                    "to be held out for validation: hold out fewer"
                )
        self._first = np.cumsum([0, *(part.rows for part in self.parts)])
        self.rows = int(self._first[-1])

    @cached_property
    def validation_rows(self) -> npt.NDArray[np.int64]:
        """(n,) ids of the documents that are never trained on, ascending."""
        trained = len(self.streams)
        held_out = zip(self._first[:trained], self.streams, strict=True)
        corpus = np.arange(self._first[trained], self.rows, dtype=np.int64)
        return np.concatenate([*(first + s.held_out_rows() for first, s in held_out), corpus])

    @cached_property
    def lengths(self) -> npt.NDArray[np.int32]:
        """(rows,) tokens of each document."""
        return self._joined("lengths")

    @cached_property
    def label_tokens(self) -> npt.NDArray[np.int32]:
        """(rows,) labels of each document after its own shift."""
        return self._joined("label_tokens")

    @property
    def vocab_size(self) -> int:
        """Token ids are in [0, vocab_size)."""
        return max(part.corpus.vocab_size for part in self.parts)

    def read(self, row: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32] | None]:
        """Token ids and unshifted labels (None: every token is one) of a document, (length,) each.

        Both are read-only views of the mapped file.

        Raises:
            IndexError: `row` is not in [0, rows).
        """
        row = operator.index(row)
        if not 0 <= row < self.rows:
            raise IndexError(f"row {row} is not among this run's rows 0 to {self.rows - 1}")
        i = int(np.searchsorted(self._first, row, side="right")) - 1
        return self.parts[i].read(row - int(self._first[i]))

    def _joined(self, column: str) -> npt.NDArray[np.int32]:
        if len(self.parts) == 1:
            return cast(npt.NDArray[np.int32], getattr(self.parts[0], column))
        joined = np.empty(self.rows, np.int32)
        for part, (first, stop) in zip(self.parts, pairwise(self._first.tolist()), strict=True):
            joined[first:stop] = getattr(part, column)
            setattr(part, column, joined[first:stop])  # lets go of its own copy
        return joined


def _number(corpus: Corpus) -> int:
    """The corpus's fingerprint, as far as a JSON number can hold it."""
    return int(corpus.manifest.fingerprint[:13], 16)


def _check_alike(parts: Sequence[Documents]) -> None:
    first = parts[0].corpus
    seen: set[Path] = set()
    for corpus in (part.corpus for part in parts):
        mine, firsts = corpus.manifest.tokenizer, first.manifest.tokenizer
        if mine.sha256 != firsts.sha256:
            raise CorpusError(
                f"{corpus.path}: made by tokenizer {mine.name} and {first.path} by {firsts.name}, "
                "whose ids mean other texts: annotate both with one tokenizer"
            )
        if (place := corpus.path.resolve()) in seen:
            raise CorpusError(
                f"{corpus.path}: is given twice; to train on more of it raise its weight, to "
                "validate on some of it hold a number of its sequences out"
            )
        seen.add(place)
