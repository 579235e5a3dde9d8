"""The main job, end to end: real Ray, gloo, FSDP2, HiGHS, Arrow, W&B offline."""

from __future__ import annotations

import json
import os
import signal
import time

import psutil
import pytest

from flexray.config import load_config
from flexray.datasets.builtin import builtin_corpus
from flexray.datasets.corpus import Corpus
from flexray.datasets.documents import Documents
from tests.flexray.runs import events, finish, start

STEPS = 6


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on 4 ranks and its output."""
    folder = tmp_path_factory.mktemp("runs")
    settings = ("run.name=four", f"train.steps={STEPS}", "train.dtype=float64")
    code, output = finish(start(folder, *settings))
    assert code == 0, output
    return folder / "four", output


def test_the_run_directory_tells_what_happened(trained):
    run, output = trained
    config = load_config(run / "config.yaml", [])
    assert (config.run.name, config.train.steps) == ("four", STEPS)

    (generation,) = events(run, "generation")
    assert generation["world"] == len(set(generation["pids"])) == len(generation["nodes"]) == 4
    assert (generation["generation"], generation["cause"], generation["at_step"]) == (1, "start", 1)

    documents = Documents(Corpus.open(builtin_corpus()), 256, "split")
    (data,) = events(run, "data")
    assert data["rows"] == documents.rows and data["split_rows"] == documents.report.split_rows > 0
    assert f"{data['split_rows']:,} longer ones split" in output

    steps = events(run, "step")
    assert [event["step"] for event in steps] == list(range(1, STEPS + 1))
    for event in steps:
        lengths = documents.lengths[event["rows"]]
        assert event["tokens"] == lengths.sum()
        assert event["label_tokens"] == (lengths - 1).sum()
        assert event["step_s"] > 0 and event["planned_s"] >= event["lower_bound_s"] > 0
        assert all(sum(degrees) <= 4 for degrees in event["groups"])
    assert len({row for event in steps for row in event["rows"]}) == 8 * STEPS
    assert steps[-1]["loss"] < steps[0]["loss"]

    plans = [json.loads(line) for line in (run / "plans.jsonl").read_text().splitlines()]
    for event, plan in zip(steps, plans, strict=True):
        groups = [g for m in plan["micro_steps"] for g in m["groups"]]
        assert sorted(row for g in groups for row in g["rows"]) == list(range(8))
        assert event["groups"] == [[g["degree"] for g in m["groups"]] for m in plan["micro_steps"]]
    assert list(run.glob("wandb/offline-run-*/*.wandb"))
    assert f"step {STEPS}/{STEPS}" in output.replace("  ", " ")
    assert str(run) in output


def test_one_rank_has_the_same_loss_curve(trained):
    run, _ = trained
    settings = ("run.name=one", f"train.steps={STEPS}", "train.dtype=float64", "cluster.gpus=1")
    code, output = finish(start(run.parent, *settings))
    assert code == 0, output
    four, one = events(run, "step"), events(run.parent / "one", "step")
    assert [e["rows"] for e in four] == [e["rows"] for e in one]
    assert any(groups != [[1]] for e in four for groups in [e["groups"]])
    assert [e["loss"] for e in four] == pytest.approx([e["loss"] for e in one], rel=1e-10)


def wait_for_steps(process, run, count, timeout_s=120):
    deadline = time.monotonic() + timeout_s
    while len(events(run, "step")) < count:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.1)


def processes_of(process):
    return psutil.Process(process.pid).children(recursive=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_an_interrupt_stops_cleanly(tmp_path, number):
    process = start(tmp_path, "run.name=long", "train.steps=100000")
    wait_for_steps(process, tmp_path / "long", 2)
    children = processes_of(process)
    process.send_signal(number)
    code, output = finish(process, 60)
    assert code == 130
    assert "Stopped after" in output and str(tmp_path / "long") in output
    assert "Traceback" not in output and "SIGTERM received" not in output
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    steps = events(tmp_path / "long", "step")
    assert [e["step"] for e in steps] == list(range(1, len(steps) + 1))


def test_a_killed_actor_ends_the_run_with_one_line(tmp_path):
    process = start(tmp_path, "run.name=killed", "train.steps=100000")
    run = tmp_path / "killed"
    wait_for_steps(process, run, 2)
    children = processes_of(process)
    os.kill(events(run, "generation")[0]["pids"][2], signal.SIGKILL)
    code, output = finish(process, 60)
    assert code == 1
    assert "Failed after" in output and "died during step" in output
    assert "Traceback" not in output
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive


def test_a_bad_setting_is_one_line_and_leaves_nothing(tmp_path):
    for setting, words in {
        "data.over_length=error": "raise max_length",
        "cluster.device=cuda": "the Ray cluster has no GPU",
    }.items():
        code, output = finish(start(tmp_path, setting))
        (line,) = [x for x in output.splitlines() if x.startswith("error:")]
        assert code == 2 and words in line, output
        assert "Traceback" not in output
    assert not list(tmp_path.iterdir())
