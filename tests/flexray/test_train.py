"""The main job, end to end: real Ray, gloo, FSDP2, HiGHS, Arrow, W&B offline."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from flexray.config import load_config
from flexray.data_preparation import data_source
from flexray.datasets.builtin import builtin_corpus
from flexray.datasets.corpus import Corpus
from flexray.datasets.documents import Documents
from tests.flexray.runs import events, finish, start

STEPS = 6
HELD_OUT = 20
SETTINGS = (
    f"train.steps={STEPS}",
    "train.dtype=float64",
    "train.validate_every=4",
    f"data.validation={HELD_OUT}",
    "checkpoint.every=4",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on 4 ranks and its output."""
    folder = tmp_path_factory.mktemp("runs")
    code, output = finish(start(folder, "run.name=four", *SETTINGS, profile="2:3"))
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


def test_one_rank_has_the_same_loss_curve(trained, ray_address):
    run, _ = trained
    settings = ("run.name=one", *SETTINGS, "cluster.gpus=1")
    code, output = finish(start(run.parent, *settings, ray=ray_address))
    assert code == 0, output
    four, one = events(run, "step"), events(run.parent / "one", "step")
    assert [e["rows"] for e in four] == [e["rows"] for e in one]
    assert any(groups != [[1]] for e in four for groups in [e["groups"]])
    assert [e["loss"] for e in four] == pytest.approx([e["loss"] for e in one], rel=1e-10)
    looks = [events(folder, "validation") for folder in (run, run.parent / "one")]
    four_held_out, one_held_out = ([e["loss"] for e in found] for found in looks)
    assert four_held_out == pytest.approx(one_held_out, rel=1e-10)


def test_the_validation_loss_is_the_mean_over_all_label_tokens_of_the_exported_model(
    trained, tmp_path
):
    run, output = trained
    found = events(run, "validation")
    assert [e["step"] for e in found] == [4, STEPS]
    documents = data_source(load_config(run / "config.yaml", []).data).open()
    held_out = documents.validation_rows.tolist()
    assert len(held_out) == HELD_OUT == found[0]["sequences"]
    assert not {row for e in events(run, "step") for row in e["rows"]} & set(held_out)

    code = subprocess.run(
        [sys.executable, "-m", "flexray", "export", run, "--out", tmp_path / "model"]
    ).returncode
    assert code == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    assert model.dtype == torch.float64
    loss = tokens = 0
    for row in held_out:
        ids = torch.from_numpy(documents.read(row)[0].copy()).long()
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0]
        loss += float(F.cross_entropy(logits[:-1], ids[1:], reduction="sum"))
        tokens += len(ids) - 1
    assert found[-1]["label_tokens"] == tokens
    assert found[-1]["loss"] == pytest.approx(loss / tokens, rel=1e-12)
    assert f"validation after step {STEPS}: loss {loss / tokens:.4f}" in output


def test_checkpoints_are_taken_on_the_way_and_at_the_end(trained):
    run, output = trained
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == [
        "step-00000004",
        f"step-{STEPS:08d}",
    ]
    assert [e["step"] for e in events(run, "checkpoint")] == [4, STEPS]
    assert f"checkpoint of step {STEPS}: {run}/checkpoints/step-{STEPS:08d}" in output


def test_a_profile_is_a_chrome_trace_of_each_rank(trained):
    run, output = trained
    assert f"{run}/profile/rank-*.json" in output
    for rank in range(4):
        trace = json.loads((run / "profile" / f"rank-{rank}.json").read_text())
        names = {event.get("name", "") for event in trace["traceEvents"]}
        assert any("scaled_dot_product" in name for name in names)
        # Two steps, no more.
        steps = [e for e in trace["traceEvents"] if e.get("name") == "Optimizer.step#AdamW.step"]
        assert len(steps) == 2


def wait_for_steps(process, run, count, timeout_s=120):
    deadline = time.monotonic() + timeout_s
    while len(events(run, "step")) < count:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.1)


def processes_of(process, run):
    """What the run has started, and its ranks, which may be on a Ray that it has not."""
    ranks = [psutil.Process(pid) for pid in events(run, "generation")[0]["pids"]]
    return {*psutil.Process(process.pid).children(recursive=True), *ranks}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_an_interrupt_stops_after_the_step_with_a_checkpoint(tmp_path, number, ray_address):
    settings = ("run.name=long", "train.steps=100000", "cluster.gpus=2")
    # Once on a Ray of its own, which has to end too.
    process = start(tmp_path, *settings, ray=ray_address if number == signal.SIGTERM else None)
    wait_for_steps(process, tmp_path / "long", 2)
    children = processes_of(process, tmp_path / "long")
    process.send_signal(number)
    code, output = finish(process, 60)
    assert code == 130
    assert "Stopping after the steps under way, with a checkpoint" in output
    assert "Traceback" not in output and "SIGTERM received" not in output
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    run = tmp_path / "long"
    done = len(events(run, "step"))
    assert [e["step"] for e in events(run, "step")] == list(range(1, done + 1))
    assert [e["step"] for e in events(run, "checkpoint")] == [done]
    assert f"Stopped after {done} of 100000 steps" in output
    assert f"To go on from step {done}: flexray train --resume {run}" in output


def test_a_second_interrupt_stops_at_once(tmp_path):
    # A step that takes long: the first signal would wait for it.
    settings = ("run.name=long", "train.steps=100000", "checkpoint.every=2", "cluster.gpus=2")
    process = start(tmp_path, *settings)
    run = tmp_path / "long"
    wait_for_steps(process, run, 4)
    children = processes_of(process, run)
    os.kill(events(run, "generation")[0]["pids"][1], signal.SIGSTOP)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    code, output = finish(process, 60)
    assert code == 130
    assert re.search(rf"To go on from step \d+: flexray train --resume {run}$", output.strip())
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive


def test_gradients_that_stay_non_finite_end_the_run_with_one_line(tmp_path, ray_address):
    settings = ("run.name=inf", "train.learning_rate=1e30", "train.warmup_steps=0")
    settings += ("train.max_nonfinite_steps=2", "cluster.gpus=2")
    code, output = finish(start(tmp_path, *settings, ray=ray_address))
    assert code == 1, output
    (line,) = [x for x in output.splitlines() if x.startswith("Failed after")]
    assert "was not finite in 2 steps in a row (train.max_nonfinite_steps): lower" in line
    steps = events(tmp_path / "inf", "step")
    assert [e["skipped"] for e in steps[-2:]] == [True, True] and not steps[0]["skipped"]
    assert f"step {steps[-1]['step']} skipped: its gradient is not finite" in output
    assert "Traceback" not in output


def test_a_dry_run_shows_the_first_plan_and_writes_nothing(tmp_path):
    code, output = finish(start(tmp_path, "cluster.gpus=4", dry_run=True))
    assert code == 0, output
    for words in ("sequences of up to 256 tokens", "memory of a rank, estimated", "step 1: 8"):
        assert words in output
    assert "ray" not in output.lower() and not list(tmp_path.iterdir())


def test_a_bad_setting_is_one_line_and_leaves_nothing(tmp_path, ray_address):
    for setting, words in {
        "data.over_length=error": "raise max_length",
        "cluster.device=cuda": "the Ray cluster has no GPU",
    }.items():
        code, output = finish(start(tmp_path, setting, ray=ray_address))
        (line,) = [x for x in output.splitlines() if x.startswith("error:")]
        assert code == 2 and words in line, output
        assert "Traceback" not in output
    assert not list(tmp_path.iterdir())
