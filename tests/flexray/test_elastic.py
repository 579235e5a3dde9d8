"""Runs whose ranks come and go, as a user sees them: on one Ray cluster, by the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import ray

from flexray.json_lines import read_json_lines
from tests.flexray.runs import SMALL, events, finish, start

# Whole runs on two cores: minutes on a machine that does much else.
pytestmark = pytest.mark.timeout(600)

SETTINGS = (
    *SMALL,
    "train.dtype=float64",
    "train.learning_rate=3e-4",
    "train.batch_sequences=12",
    "planner.capacity=100000",
)


@pytest.fixture(scope="module")
def address(two_nodes):
    """Of two nodes of two CPUs."""
    return f"cluster.address={two_nodes.address}", "cluster.device=cpu"


def until(condition, process, timeout_s=120):
    """Waits for something that a run in another process does."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, condition
        time.sleep(0.05)


def generations(run):
    return [(e["cause"], e["world"]) for e in events(run, "generation")]


def scale(run, gpus):
    done = subprocess.run(
        [sys.executable, "-m", "flexray", "scale", run, str(gpus)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def losses(tmp_path_factory, address):
    """Of a run that nothing happened to."""
    folder = tmp_path_factory.mktemp("quiet")
    settings = ("run.name=quiet", "train.steps=200", "cluster.gpus=1", *address, *SETTINGS)
    code, output = finish(start(folder, *settings, small=False))
    assert code == 0, output
    return {e["step"]: e["loss"] for e in events(folder / "quiet", "step")}


def test_kill_then_scale_then_stop(tmp_path, address, losses):
    process = start(
        tmp_path,
        "run.name=run",
        "train.steps=100000",
        "checkpoint.every=1",  # a change finds its way between them
        "cluster.gpus=3",
        *address,
        *SETTINGS,
        small=False,
    )
    run = tmp_path / "run"
    until(lambda: len(events(run, "step")) >= 3, process)
    (first,) = events(run, "generation")
    assert (first["cause"], first["world"]) == ("start", 3)
    os.kill(first["pids"][1], signal.SIGKILL)
    until(lambda: generations(run)[-1] == ("death", 2), process)
    until(lambda: generations(run)[-1] == ("scale", 3), process)  # another one has come
    scale(run, 1)
    until(lambda: generations(run)[-1] == ("scale", 1), process)
    scale(run, 2)
    until(lambda: generations(run)[-1] == ("scale", 2), process)
    until(lambda: len(events(run, "step")) >= events(run, "generation")[-1]["at_step"] + 1, process)
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == 130, output
    assert "rank 1 died" in output and "generation 2 (death): 2 ranks from step" in output
    assert "scaling to 1 ranks" in output and "Traceback" not in output

    steps = events(run, "step")
    assert [e["step"] for e in steps] == list(range(1, len(steps) + 1))
    known = steps[: len(losses)]
    assert [e["loss"] for e in known] == pytest.approx(
        list(losses.values())[: len(known)], rel=1e-10
    )
    plans = [json.loads(x)["step"] for x in (run / "plans.jsonl").read_text().splitlines()]
    assert plans == [e["step"] for e in steps]
    formed = events(run, "generation")
    assert [e["generation"] for e in formed] == list(range(1, len(formed) + 1))
    assert set(formed[1]["pids"]) < set(first["pids"])  # the same processes go on
    assert all(e["pause_s"] > 0 and e["steps_again"] <= 2 for e in formed)
    assert formed[1]["restore_s"] > 0 and formed[1]["copies_mb"] > 0


def test_a_refused_size_is_told_and_changes_nothing(tmp_path, address):
    settings = ("run.name=run", "train.steps=100000", "cluster.gpus=2", "planner.capacity=200")
    process = start(tmp_path, *settings, *address)  # 256 tokens need two
    run = tmp_path / "run"
    until(lambda: len(events(run, "step")) >= 1, process)
    scale(run, 1)
    until(lambda: not (run / "scale.json").exists(), process)
    done = len(events(run, "step"))
    until(lambda: len(events(run, "step")) >= done + 3, process)
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == 130 and "not scaled: 1 GPUs: the longest sequence needs 2" in output
    assert generations(run) == [("start", 2)]


def test_too_few_ranks_are_waited_for_and_then_the_state_is_saved(tmp_path, address):
    """Four CPUs, three of them taken by others once the run is on: nobody can come."""
    process = start(
        tmp_path,
        "run.name=run",
        "train.steps=100000",
        "cluster.gpus=2",
        "cluster.min_gpus=2",
        "cluster.wait_s=4",
        "planner.capacity=200",  # one rank alone could not make a step
        *address,
    )
    run = tmp_path / "run"
    until(lambda: len(events(run, "step")) >= 3, process)

    @ray.remote(num_cpus=1)
    class Taken:
        pass

    others = [Taken.remote() for _ in range(3)]
    time.sleep(1)
    os.kill(events(run, "generation")[0]["pids"][0], signal.SIGKILL)
    code, output = finish(process)
    for other in others:
        ray.kill(other)
    assert code == 1
    assert "1 of the 2 ranks that are needed are there: waiting for more, for 4 s" in output
    assert (
        "2 ranks are needed and did not come in 4 s (cluster.wait_s)" in output
        and "Traceback" not in output
    )
    done = len(events(run, "step"))
    assert [e["step"] for e in events(run, "checkpoint")] == [done]
    assert f"To go on from step {done}: flexray train --resume {run}" in output


def test_a_rank_and_its_copy_lost_at_once_go_back_to_the_checkpoint(tmp_path, address, losses):
    process = start(
        tmp_path,
        "run.name=run",
        "train.steps=60",
        "checkpoint.every=5",
        "cluster.gpus=2",
        *address,
        *SETTINGS,
        small=False,
    )
    run = tmp_path / "run"
    until(lambda: events(run, "checkpoint") and len(events(run, "step")) % 5 == 2, process)
    for pid in events(run, "generation")[0]["pids"]:
        os.kill(pid, signal.SIGKILL)
    code, output = finish(process)
    assert code == 0, output
    assert "back to the checkpoint of step" in output and "Traceback" not in output
    (back,) = events(run, "resume")
    assert back["at_step"] % 5 == 1 and "step-0000" in back["location"]
    steps = events(run, "step")
    assert [e["step"] for e in steps] == list(range(1, 61))
    assert [e["loss"] for e in steps] == pytest.approx(
        [losses[e["step"]] for e in steps], rel=1e-10
    )


def test_a_loss_of_ones_own_that_fails_is_one_line(tmp_path, address):
    program = """
import sys
import torch
from flexray import Trainer

calls = []

def broken(logits, labels):
    calls.append(1)
    if len(calls) > 5:  # on the ranks; it is tried out before they start
        raise TypeError("not my labels")
    return torch.nn.functional.cross_entropy(logits, labels, reduction="none")

try:
    Trainer({"run": {"dir": sys.argv[1]}}, loss=broken, overrides=sys.argv[2:]).train()
except Exception as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path, *SMALL, "cluster.gpus=2", *address],
        capture_output=True,
        text=True,
        env=os.environ | {"RAY_AUTH_MODE": "disabled", "WANDB_MODE": "offline"},
    )
    assert done.stdout, done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("RunFailed ") and "TypeError: not my labels" in last


def test_resources_left_behind_when_the_controller_dies(tmp_path, address):
    """ray#62753, #56011: SIGKILL of the driver in mid-resize: no actor, no reservation left."""
    process = start(tmp_path, "run.name=run", "train.steps=100000", "cluster.gpus=3", *address)
    run = tmp_path / "run"
    until(lambda: len(events(run, "step")) >= 2, process)
    pids = events(run, "generation")[0]["pids"]
    scale(run, 6)  # more than there is: some are pending
    until(lambda: not (run / "scale.json").exists(), process)
    os.kill(pids[0], signal.SIGKILL)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    while ray.available_resources().get("CPU", 0) < 4 or any(map(psutil.pid_exists, pids)):
        assert time.monotonic() < deadline, ray.available_resources()
        time.sleep(0.2)
    code, output = finish(start(tmp_path, "train.steps=2", "cluster.gpus=4", *address))
    assert code == 0, output


def test_a_draining_node_is_left_before_it_goes(tmp_path, two_nodes, address, losses):
    node = two_nodes.add_node(num_cpus=2)
    try:
        process = start(
            tmp_path,
            "run.name=run",
            "train.steps=80",
            "cluster.gpus=6",
            *address,
            *SETTINGS,
            small=False,
        )
        run = tmp_path / "run"
        until(lambda: len(events(run, "step")) >= 2, process)
        drain = ray._raylet.GcsClient(address=two_nodes.address).drain_node
        drain(node.node_id, 2, "a spot notice", int(1000 * (time.time() + 30)))
        until(lambda: generations(run)[-1] == ("drain", 4), process)
        left = events(run, "generation")[-1]
        assert node.node_id not in left["nodes"] and left["steps_again"] == 0
        code, output = finish(process)
        assert code == 0, output
    finally:
        two_nodes.remove_node(node)
    steps = list(read_json_lines(run / "events.jsonl"))
    found = [e["loss"] for e in steps if e["kind"] == "step"]
    assert found == pytest.approx([losses[n] for n in range(1, 81)], rel=1e-10)
