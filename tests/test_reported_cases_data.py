"""The data failures that people reported in public, one test a line, named after the symptom."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import numpy as np
import pyarrow as pa
import pytest

from flexray.datasets.annotate import annotate
from flexray.datasets.corpus import Corpus
from flexray.datasets.documents import Documents, OverLength
from flexray.datasets.errors import CorpusError
from flexray.datasets.sampler import Sampler, Stream


def corpus_of(folder: Path, lengths: list[int]) -> Corpus:
    """Row i holds `lengths[i]` times the token i."""
    folder.mkdir()
    rows = [{"input_ids": [i % 256] * n} for i, n in enumerate(lengths)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return annotate([folder / "rows.jsonl"], folder / "corpus", "bytes")


@pytest.mark.parametrize("policy", get_args(OverLength))
def test_over_length_rows_are_not_lost_in_silence(tmp_path: Path, policy: OverLength) -> None:
    """ART#665, ms-swift#1699, unsloth#7234."""
    corpus = corpus_of(tmp_path / "c", [10, 25, 20, 41])
    if policy == "error":
        with pytest.raises(CorpusError, match="row 1 has 25 tokens, more than max_length 20"):
            Documents(corpus, 20, policy)
        return
    report = Documents(corpus, 20, policy).report
    rows, lost_tokens, lost_labels = {
        "drop": (2, 66, 64),  # 25 + 41 tokens, 24 + 40 labels
        "truncate": (4, 26, 26),  # the last 5 and 21 tokens
        "split": (7, 0, 3),  # 20 5 and 20 20 1: the first token of each further piece
    }[policy]
    assert (report.rows, report.lost_tokens, report.lost_label_tokens) == (
        rows,
        lost_tokens,
        lost_labels,
    )
    changed = {"drop": "dropped_rows", "truncate": "truncated_rows", "split": "split_rows"}
    assert report.as_dict()[changed[policy]] == 2
    assert report.zero_length_rows == 0


@pytest.mark.parametrize("rows", [64, 61, 7, 1])
@pytest.mark.parametrize("tokens", [False, True])
def test_resume_at_the_end_of_an_epoch_does_not_skip_the_next(rows: int, tokens: bool) -> None:
    """verl#7401: with and without a short last batch; the total over three epochs is exact."""
    lengths = np.arange(rows, dtype=np.int32) % 9 + 1

    def make() -> Sampler:
        if tokens:
            return Sampler([Stream(rows)], 5, batch_tokens=40, lengths=lengths)
        return Sampler([Stream(rows)], 5, batch_sequences=8)

    sampler, seen = make(), np.zeros(rows, int)
    for epoch in range(3):
        while sampler.epochs == (epoch,):
            np.add.at(seen, sampler.next(), 1)
        assert (seen == epoch + 1).all()
        state = json.loads(json.dumps(sampler.state_dict()))
        sampler = make()
        sampler.load_state_dict(state)
    assert seen.sum() == 3 * rows


@pytest.mark.parametrize("kills", [[0], [1], [3, 3, 9], list(range(16))])
@pytest.mark.parametrize("streams", [[Stream(100)], [Stream(60, 5, 3), Stream(20), Stream(9, 1)]])
def test_kill_and_resume_repeats_and_loses_no_row(kills: list[int], streams: list[Stream]) -> None:
    """prime-rl#1035, SimpleTuner#2986: the one state is the driver's; ids are compared."""
    steady = Sampler(streams, 0, batch_sequences=16)
    wanted = np.concatenate([steady.next() for _ in range(16)])
    sampler, got, committed = Sampler(streams, 0, batch_sequences=16), [], None
    for step in range(16):
        if step in kills:
            sampler = Sampler(streams, 0, batch_sequences=16)
            if committed:
                sampler.load_state_dict(committed)
        got.append(sampler.next())
        committed = sampler.state_dict()
    assert np.concatenate(got).tolist() == wanted.tolist()


@pytest.mark.parametrize("world", [2, 8])
def test_sampler_state_loads_at_another_world_size(world: int) -> None:
    """torchtitan#811, #816: saved at 4 ranks, loaded at 2 and 8; no rank appears in the state."""
    saved = Sampler([Stream(1000)], 1, batch_sequences=4 * 8)
    seen = [saved.next() for _ in range(5)]
    state = saved.state_dict()
    assert state == {"seed": 1, "draws": 160, "corpora": {"0": vars(Stream(1000))}}
    loaded = Sampler([Stream(1000)], 1, batch_sequences=world * 8)
    loaded.load_state_dict(state)
    while loaded.epochs == (0,):
        seen.append(loaded.next())
    assert np.array_equal(np.sort(np.concatenate(seen)), np.arange(1000))


def test_lengths_that_are_all_zero_are_refused(tmp_path: Path) -> None:
    """NeMo Automodel#3755, also where the manifest agrees with them."""
    folder = corpus_of(tmp_path / "c", [3, 4]).path
    (path,) = folder.glob("*.arrow")
    empty = pa.table(
        {
            "input_ids": pa.array([[], []], pa.list_(pa.int32())),
            "length": pa.array([0, 0], pa.int32()),
            "label_tokens": pa.array([0, 0], pa.int32()),
        }
    )
    with pa.ipc.new_file(path, empty.schema) as file:
        file.write_table(empty)
    manifest = json.loads((folder / "manifest.json").read_text())
    nothing = {"tokens": 0, "label_tokens": 0}
    manifest.update(nothing)
    manifest["files"][0].update(nothing, bytes=path.stat().st_size)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CorpusError, match="all 2 lengths are 0"):
        Corpus.open(folder)


def test_lengths_are_tokens_not_characters(tmp_path: Path) -> None:
    """NeMo Automodel#3755: 4 characters, 11 bytes."""
    (tmp_path / "a.txt").write_text("猫猫é€", encoding="utf-8")
    corpus = annotate([tmp_path / "a.txt"], tmp_path / "c", "bytes")
    assert corpus.lengths.tolist() == [len("猫猫é€".encode())] == [11]


def test_zero_length_rows_are_filtered_and_counted(tmp_path: Path) -> None:
    """flash-attention#1537, #2562: when annotating; on opening, see the policies' own tests."""
    corpus = corpus_of(tmp_path / "c", [0, 5, 0, 0, 7])
    assert corpus.manifest.dropped == {"empty": 3}
    assert corpus.lengths.tolist() == [5, 7]
    assert corpus.tokens(0).tolist() == [1] * 5
