"""From the config's words about data to checked rows and their order."""

from __future__ import annotations

import json

import numpy as np
import pytest

from flexray.config import load_config
from flexray.data_preparation import check_documents, data_source, make_sampler
from flexray.datasets.annotate import annotate
from flexray.datasets.errors import CorpusError
from flexray.errors import UserError


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Three byte-tokenised corpora of 40, 20 and 10 rows of 1 to 40 tokens, as text."""
    folder = tmp_path_factory.mktemp("corpora")
    for name, rows in (("a", 40), ("b", 20), ("c", 10)):
        texts = [{"text": "x" * (1 + i)} for i in range(rows)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(t) + "\n" for t in texts))
        annotate([folder / f"{name}.jsonl"], folder / name, "bytes")
    return folder


def section(*overrides):
    return load_config(None, list(overrides))


def test_a_mixture_with_a_validation_corpus(corpora):
    entries = f"{{corpus: {corpora}/a, weight: 0.75}}, {{corpus: {corpora}/b, weight: 0.25}}"
    config = section(
        f"data.mixture=[{entries}]",
        f"data.validation={corpora}/c",
        "train.batch_tokens=500",
        "train.seed=3",
    )
    assert load_config_again(config) == config
    documents = data_source(config.data).open()
    assert [(s.rows, s.held_out, s.weight) for s in documents.streams] == [(40, 0, 3), (20, 0, 1)]
    assert documents.validation_rows.tolist() == list(range(60, 70))
    check_documents(documents, 256)
    sampler = make_sampler(documents, config.train)
    dealt = [sampler.next() for _ in range(30)]
    totals = [int(documents.lengths[rows].sum()) for rows in dealt]
    assert max(totals) <= 500
    assert min(totals) > 500 - 40
    everything = np.concatenate(dealt)
    assert everything.max() < 60
    assert abs((everything < 40).mean() - 0.75) < 2 / len(everything)


def load_config_again(config):
    """As the run's config.yaml is read when it is resumed."""
    from flexray.config import Config

    return Config.model_validate_json(json.dumps(config.to_dict()))


def test_sequences_held_out_of_one_corpus_do_not_depend_on_the_seed(corpora):
    held_out = []
    for seed in (0, 1):
        config = section(f"data.corpus={corpora}/a", "data.validation=10", f"train.seed={seed}")
        documents = data_source(config.data).open()
        held_out.append(documents.validation_rows.tolist())
        sampler = make_sampler(documents, config.train)
        epoch = np.concatenate([sampler.next() for _ in range(4)])
        assert sorted(epoch.tolist() + held_out[-1]) == list(range(40))
    assert held_out[0] == held_out[1]


def test_the_built_in_corpus_in_a_mixture(corpora, monkeypatch, tmp_path):
    entries = f"[{{corpus: builtin, weight: 1}}, {{corpus: {corpora}/a, weight: 1}}]"
    documents = data_source(section(f"data.mixture={entries}").data).open()
    assert documents.parts[0].corpus.path.name.startswith("stdlib-")
    monkeypatch.chdir(corpora)
    relative = data_source(section("data.corpus=a").data)
    monkeypatch.chdir(tmp_path)
    assert relative.open().rows == 40


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.corpus=/nowhere"], "/nowhere: no such corpus folder"),
        (["data.validation=/nowhere"], "/nowhere: no such corpus folder"),
        (["data.corpus={}/a", "data.validation={}/a"], "/a: is given twice"),
        (["data.corpus={}/a", "data.validation=40"], "/a: has 40 sequences, and 40 are to be held"),
        (
            ["data.corpus={}/a", "data.max_length=9", "data.over_length=error"],
            "/a: row 9 has 10 tokens, more than max_length 9",
        ),
        (
            [
                "data.corpus={}/b",
                "data.max_length=20",
                "data.over_length=error",
                "data.validation={}/a",
            ],
            "/a: row 20 has 21 tokens",
        ),
    ],
)
def test_data_that_cannot_be_used_is_one_line(corpora, overrides, words):
    with pytest.raises(CorpusError) as error:
        data_source(section(*(o.format(corpora) for o in overrides)).data).open()
    assert words in str(error.value) and "\n" not in str(error.value)


def test_every_corpus_must_fit_the_model(corpora):
    config = section(f"data.corpus={corpora}/a", f"data.validation={corpora}/b")
    with pytest.raises(UserError, match="/a: token ids go up to 255 and the model's"):
        check_documents(data_source(config.data).open(), 255)
    (corpora / "one.jsonl").write_text('{"text": "x"}\n')
    annotate([corpora / "one.jsonl"], corpora / "one", "bytes")
    config = section(f"data.corpus={corpora}/a", f"data.validation={corpora}/one")
    with pytest.raises(UserError, match="/one: no sequence of up to 3072 tokens has a token to"):
        check_documents(data_source(config.data).open(), 256)
    config = section(f"data.corpus={corpora}/a", "data.max_length=1", "data.over_length=drop")
    with pytest.raises(UserError, match="/a: no sequence of up to 1 tokens has a token to predict"):
        check_documents(data_source(config.data).open(), 256)
