"""Ranks that run out of memory: smaller plans, the same batches, nothing lost."""

from __future__ import annotations

import subprocess
import sys

import pytest

from flexray.json_lines import read_json_lines
from tests.flexray.runs import SMALL, environment, events

pytestmark = pytest.mark.timeout(600)

PROGRAM = """
import sys
import torch
from flexray import Trainer
from flexray.errors import RunFailed, UserError

folder, name, limit, *overrides = sys.argv[1:]
settings = {"run": {"dir": folder, "name": name}, "tracking": {"wandb": "disabled"}}

def loss(logits, labels):
    if len(logits) > int(limit):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
    return torch.nn.functional.cross_entropy(logits, labels, reduction="none")

try:
    Trainer(settings, loss=loss, overrides=overrides).train()
except (RunFailed, UserError) as error:
    print(type(error).__name__, error)
"""
SETTINGS = (
    *SMALL,
    "train.steps=8",
    "train.dtype=float64",
    "train.batch_sequences=12",
    "model.loss_chunk=100000",
    "planner.capacity=100000",
    "cluster.device=cpu",
    "cluster.gpus=2",
)


@pytest.fixture(scope="module")
def train(two_nodes, tmp_path_factory):
    """Trains on ranks that hold so many tokens; the run's folder and what it said."""

    def train(limit, *overrides):
        folder = tmp_path_factory.mktemp("runs")
        done = subprocess.run(
            [
                *(sys.executable, "-c", PROGRAM, folder, "run", str(limit), *SETTINGS, *overrides),
                f"cluster.address={two_nodes.address}",
            ],
            capture_output=True,
            text=True,
            env=environment(),
        )
        assert done.returncode == 0, done.stderr
        return folder / "run", done.stdout

    return train


@pytest.fixture(scope="module")
def roomy(train):
    run, _ = train(10**9)
    return run


def half(run):
    """Tokens that the fuller of two ranks gets at least, when a step is one micro-step."""
    return max(e["tokens"] for e in events(run, "step")) / 2


def largest(run):
    """Tokens that a rank got at most in each step."""
    return [
        max(-(-g["tokens"] // g["degree"]) for m in plan["micro_steps"] for g in m["groups"])
        for plan in read_json_lines(run / "plans.jsonl")
    ]


def test_plans_shrink_until_they_fit_and_nothing_is_lost(train, roomy):
    limit = int(0.75 * half(roomy))  # twice 0.8 is less than that, once is not
    run, output = train(limit)
    assert max(largest(run)) <= limit
    memory = [e for e in events(run, "generation") if e["cause"] == "memory"]
    assert 1 <= len(memory) <= 2 and all(e["world"] == 2 for e in memory)
    assert len({tuple(e["pids"]) for e in events(run, "generation")}) == 1  # the same processes
    assert "ran out of memory" in output and "tokens a GPU at most from here on" in output
    steps, undisturbed = events(run, "step"), events(roomy, "step")
    assert [e["step"] for e in steps] == list(range(1, 9))
    assert [e["rows"] for e in steps] == [e["rows"] for e in undisturbed]
    assert [e["loss"] for e in steps] == pytest.approx([e["loss"] for e in undisturbed], rel=1e-10)


def test_the_third_in_a_row_ends_the_run_with_one_line(train, roomy):
    limit = int(0.2 * half(roomy))  # not after 0.8 twice
    run, output = train(limit)
    last = output.splitlines()[-1]
    assert last.startswith("RunFailed ") and "ran out of memory" in last
    assert last.endswith("(3 generations in a row)")
    assert [e["cause"] for e in events(run, "generation")] == ["start", "memory", "memory"]


def test_a_sequence_that_does_not_fit_at_all_ends_the_run_with_one_line(train):
    run, output = train(100, "planner.degrees=[1]", "train.batch_sequences=1")
    last = output.splitlines()[-1]
    assert last.startswith("RunFailed out of memory with ") and "lower data.max_length" in last
    assert [e["cause"] for e in events(run, "generation")] == ["start"]
