"""The tokenizer beside an exported model, where its files are known."""

from __future__ import annotations

import shutil
from pathlib import Path

from flexray.config import Config
from flexray.data_preparation import data_source
from flexray.datasets.errors import CorpusError
from flexray.datasets.manifest import Manifest
from flexray.datasets.tokenizer import load_tokenizer

PATTERNS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
    "generation_config.json",
)


def copy_tokenizer(config: Config, folder: Path) -> str | None:
    """Copies the files of the model's or the corpus's tokenizer; returns where they are from.

    The model's own folder comes first. What the corpus names is taken where it is a local path that
    still holds the tokenizer that made the corpus. None: there are no such files.
    """
    if (source := config.model.path) is not None and any(source.glob("tokenizer*")):
        return _copy(source, folder)
    try:
        info = Manifest.read(data_source(config.data).corpora[0]).tokenizer
        path = Path(info.name).expanduser()
        if info.name == "bytes" or not path.exists():
            return None
        if load_tokenizer(info.name).info.sha256 != info.sha256:
            return None
    except CorpusError:  # the corpus is not here
        return None
    if path.is_file():
        shutil.copyfile(path, folder / "tokenizer.json")
        return str(path)
    return _copy(path, folder)


def _copy(source: Path, folder: Path) -> str:
    for pattern in PATTERNS:
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, folder / file.name)
    return str(source)
