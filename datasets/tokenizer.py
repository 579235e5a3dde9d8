"""Tokenizers by name: `bytes`, a local folder or file, or a Hugging Face model name."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from flexray.datasets.errors import CorpusError
from flexray.datasets.manifest import TokenizerInfo

if TYPE_CHECKING:
    import tokenizers
    import transformers

Int32Array = npt.NDArray[np.int32]


class Tokenizer(Protocol):
    """Turns documents into token ids in [0, vocab_size)."""

    info: TokenizerInfo
    vocab_size: int

    def encode(self, texts: list[str]) -> tuple[Int32Array, Int32Array]:
        """Tokens of each text, (texts,), and all token ids, one text after the other."""
        ...

    def decode(self, ids: Int32Array) -> str:
        """The text of (n,) token ids, for people to look at."""
        ...


class BytesTokenizer:
    """The UTF-8 bytes of a text are its 256 token ids.

    No token marks the end of a document: every document is a sequence of its own, and attention
    never crosses its borders.
    """

    info = TokenizerInfo(name="bytes", sha256=hashlib.sha256(b"UTF-8 bytes").hexdigest())
    vocab_size = 256

    def encode(self, texts: list[str]) -> tuple[Int32Array, Int32Array]:
        """See `Tokenizer.encode`."""
        encoded = [text.encode() for text in texts]
        lengths = np.array([len(text) for text in encoded], np.int32)
        return lengths, np.frombuffer(b"".join(encoded), np.uint8).astype(np.int32)

    def decode(self, ids: Int32Array) -> str:
        """See `Tokenizer.decode`."""
        return ids.astype(np.uint8).tobytes().decode(errors="replace")


class HuggingFaceTokenizer:
    """A `tokenizers.Tokenizer`, with the special tokens that its own post-processor adds.

    Truncation and padding that its file may ask for are turned off: the over-length policy
    decides what is cut, and says so.
    """

    def __init__(self, name: str, backend: tokenizers.Tokenizer) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        digest = hashlib.sha256(backend.to_str().encode()).hexdigest()
        self.info = TokenizerInfo(name=name, sha256=digest)
        self.vocab_size = max(backend.get_vocab().values()) + 1  # ids may have gaps

    def encode(self, texts: list[str]) -> tuple[Int32Array, Int32Array]:
        """See `Tokenizer.encode`. Uses all cores."""
        ids = [np.array(e.ids, np.int32) for e in self._backend.encode_batch_fast(texts)]
        lengths = np.array([len(x) for x in ids], np.int32)
        return lengths, np.concatenate(ids) if ids else np.empty(0, np.int32)

    def decode(self, ids: Int32Array) -> str:
        """See `Tokenizer.decode`."""
        return str(self._backend.decode(ids.tolist(), skip_special_tokens=False))


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer called `name`.

    Args:
        name: "bytes", a `tokenizer.json` file, a folder with one, or a model name on the Hugging
            Face Hub. A folder with more than `tokenizer.json` is read by `transformers`, as at
            inference; `tokenizer.json` alone needs only `tokenizers`.

    Raises:
        CorpusError: there is no such tokenizer, or it cannot be read.
    """
    if name == "bytes":
        return BytesTokenizer()
    file = bare_file(name)
    backend = _from_file(name, file) if file else load_transformers(name).backend_tokenizer
    return HuggingFaceTokenizer(name, backend)


def bare_file(name: str) -> Path | None:
    """The `tokenizer.json` that `name` stands for, if that is all there is.

    Raises:
        CorpusError: it is a path, and does not exist.
    """
    path = Path(name).expanduser()
    looks_local = path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1
    if not path.exists() and (looks_local or path.suffix == ".json"):
        raise CorpusError(f"tokenizer {name}: no such file or folder")
    if path.is_file():
        return path
    file = path / "tokenizer.json"
    more = ("tokenizer_config.json", "chat_template.jinja")
    return file if file.is_file() and not any((path / other).is_file() for other in more) else None


def _from_file(name: str, file: Path) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer as Backend

    try:
        return Backend.from_file(str(file))
    except Exception as error:  # the library raises nothing more specific
        raise CorpusError(
            f"tokenizer {name}: {file} is not a tokenizer.json ({error}); "
            'choose "bytes", a folder with tokenizer.json, or a Hugging Face model name'
        ) from None


def load_transformers(name: str) -> transformers.PreTrainedTokenizerFast:
    """A folder's or the Hub's tokenizer as `transformers` loads it.

    Raises:
        CorpusError: it cannot be loaded, or is not a fast one.
    """
    from transformers import AutoTokenizer

    path = Path(name).expanduser()
    try:
        loaded = AutoTokenizer.from_pretrained(
            str(path) if path.exists() else name, trust_remote_code=False
        )
    except Exception as error:  # OSError, ValueError, KeyError, hub errors: all mean "no"
        reason = str(error).strip().split("\n")[0]
        raise CorpusError(
            f"tokenizer {name}: cannot be loaded ({reason}); "
            'choose "bytes", a folder with tokenizer.json, or a Hugging Face model name'
        ) from None
    if not loaded.is_fast:
        raise CorpusError(
            f"tokenizer {name}: transformers has no fast version of it; "
            "save one as tokenizer.json and give that folder"
        )
    return loaded
