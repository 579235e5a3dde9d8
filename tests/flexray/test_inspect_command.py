"""`flexray inspect` as a user runs it."""

from __future__ import annotations

import json
import sys

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from flexray.__main__ import main
from flexray.datasets.annotate import annotate


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Rows of 1 to 100 letters, one of 5,000, an empty one and a null one."""
    folder = tmp_path_factory.mktemp("inspect")
    texts = ["", None, *("[b]" + "x" * (n - 3) if n > 3 else "y" * n for n in range(1, 101))]
    texts.append("z" * 5000)
    (folder / "in.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    annotate([folder / "in.jsonl"], folder / "corpus", "bytes")
    return folder / "corpus"


@pytest.fixture
def run(monkeypatch, capsys):
    """Exit code, stdout and stderr of `flexray inspect` with these arguments."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["flexray", "inspect", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "250")
        with pytest.raises(SystemExit) as end:
            main()
        captured = capsys.readouterr()
        return end.value.code, captured.out, captured.err

    return run


def test_shows_what_is_in_it(run, corpus):
    code, out, err = run(corpus, "--longest", "2")
    assert (code, err) == (0, "")
    words = " ".join(out.split())
    for part in (
        "bytes, vocabulary 256, sha256 473f9a4bef02",
        "rows 101",
        "tokens 10,050 label tokens 9,949: every token but the first of a row",
        "mean 99.5; shortest 1, 1% 2, 5% 6, 25% 26, median 51, 75% 76, 90% 91, 95% 96, 99% 100,",
        "99.9% 5,000, longest 5,000",
        "left out 1 empty, 1 null",
        "files 1, ",
        "64 to 127 37 36.6% 30.2%",
        "128 to 255 0 0.0% 0.0%",
        "4,096 to 8,191 1 1.0% 49.8%",
        "100 5,000 4,999 99 100 99",
    ):
        assert part in words
    assert "█" in out


def test_a_row(run, corpus):
    code, out, _ = run(corpus, "--row", "9", "--longest", "0")
    assert code == 0
    assert "Row 9: 10 tokens, 9 of them labels" in out
    assert "first ids: 91 98 93 120 120 120 120 120 120 120\n" in out
    assert "as text: '[b]xxxxxxx'" in out
    assert "longest rows" not in out
    described = json.loads(run(corpus, "--row", "100", "--json")[1])["row"]
    assert (described["length"], described["first_ids"]) == (5000, [ord("z")] * 32)


def test_a_tokenizer_that_is_not_here_or_another_by_now(run, corpus, tmp_path):
    for name in ("bytes", str(tmp_path / "gone")):
        copy = tmp_path / f"copy-{len(name)}"
        copy.mkdir()
        for path in corpus.iterdir():
            (copy / path.name).write_bytes(path.read_bytes())
        manifest = json.loads((copy / "manifest.json").read_text())
        manifest["tokenizer"] = {"name": name, "sha256": "other"}
        (copy / "manifest.json").write_text(json.dumps(manifest))
        assert "as text: the tokenizer is not on this machine" in run(copy, "--row", "9")[1]


def test_a_row_of_a_hugging_face_tokenizer_in_an_odd_folder(run, tmp_path):
    folder = tmp_path / "[red]"
    folder.mkdir()
    tokenizer = Tokenizer(models.WordLevel({"the": 0, "cat": 1, "sat": 2}, unk_token="the"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "a.txt").write_text("the cat sat")
    annotate([folder / "a.txt"], folder / "corpus", str(folder / "tokenizer.json"))
    code, out, _ = run(folder / "corpus", "--row", "0")
    assert code == 0
    assert "as text: 'the cat sat'" in out
    assert "[red]/corpus, format 1" in out


def test_json_is_all_of_it(run, corpus):
    described = json.loads(run(corpus, "--json")[1])
    assert (described["rows"], described["tokens"], described["label_tokens"]) == (101, 10050, 9949)
    assert described["percentiles"]["50"] == 51
    assert described["dropped"] == {"empty": 1, "null": 1}
    assert described["longest"][0] == {"row": 100, "length": 5000, "label_tokens": 4999}
    assert sum(bucket["rows"] for bucket in described["histogram"]) == 101
    assert sum(file["rows"] for file in described["files"]) == 101


def test_the_built_in_corpus(run):
    code, out, err = run("builtin")
    assert (code, err) == (0, "")
    assert "bytes, vocabulary 256" in out


@pytest.mark.parametrize("suffix", [".svg", ".png", ".pdf"])
def test_plot(run, corpus, tmp_path, suffix):
    path = tmp_path / f"lengths{suffix}"
    assert run(corpus, "--plot", path)[0] == 0
    picture = path.read_bytes()
    assert len(picture) > 5000
    if suffix == ".svg":
        assert run(corpus, "--plot", path)[0] == 0
        assert path.read_bytes() == picture, "the same corpus gives the same file"


def test_bad_input_is_one_line(run, corpus, tmp_path):
    for arguments, words in (
        (["/nowhere"], "/nowhere: no such corpus folder; make one with `flexray annotate`"),
        ([corpus / "manifest.json"], "manifest.json: no such corpus folder"),
        ([tmp_path], "no manifest.json, so not a finished corpus"),
        ([corpus, "--row", "101"], f"--row 101: {corpus} has the rows 0 to 100"),
        ([corpus, "--row", "-1"], f"--row -1: {corpus} has the rows 0 to 100"),
        ([corpus, "--plot", "x.bmp"], "--plot x.bmp: give a file that ends in .svg, .png or .pdf"),
        ([corpus, "--plot", "/nowhere/x.svg"], "/nowhere/x.svg: cannot be written: No such file"),
    ):
        code, out, err = run(*arguments)
        assert (code, out) == (2, "")
        assert err.startswith("error: ") and words in err
        assert err.count("\n") == 1
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in corpus.iterdir():
        (broken / path.name).write_bytes(
            path.read_bytes()[: -1 if path.suffix == ".arrow" else None]
        )
    code, out, err = run(broken)
    assert (code, out) == (2, "") and "bytes where the manifest says" in err
