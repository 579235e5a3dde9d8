"""A run that is killed, stopped or moved to another world goes on as if nothing had been."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch

from flexray.actors.checkpoint import SavedTensors
from flexray.resume import locate
from tests.flexray.runs import SMALL, environment, events, finish, start
from tests.flexray.test_tracking import read_records

# Several whole runs: seconds each, but for a machine that does much else.
pytestmark = pytest.mark.timeout(600)

STEPS, KILLED_AFTER, EVERY = 11, 8, 3
SETTINGS = (
    *SMALL,
    f"train.steps={STEPS}",
    "train.dtype=float64",
    "train.schedule=cosine",
    "data.validation=12",
    "train.validate_every=4",
    f"checkpoint.every={EVERY}",
    "cluster.gpus=1",
    "planner.capacity=100000",
)

# The API that `flexray train` is a skin of, in a driver that kills itself.
KILLS_ITSELF = f"""
import os, signal, sys
from flexray import Callback, Trainer

class Kill(Callback):
    def on_commit(self, step):
        if step == {KILLED_AFTER}:
            os.kill(os.getpid(), signal.SIGKILL)

Trainer({{"run": {{"dir": sys.argv[1], "name": "killed"}}}}, callbacks=[Kill()],
        overrides=sys.argv[2:]).train()
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory, ray_address):
    """`whole`, never stopped; and `killed`, by SIGKILL, with copies to go on from."""
    folder = tmp_path_factory.mktemp("runs")
    code, output = finish(start(folder, "run.name=whole", *SETTINGS, small=False, ray=ray_address))
    assert code == 0, output
    done = subprocess.run(
        [sys.executable, "-c", KILLS_ITSELF, folder, *SETTINGS],
        capture_output=True,
        text=True,
        timeout=150,
        env=environment(ray_address),
    )
    assert done.returncode == -9, done.stderr
    assert [e["step"] for e in events(folder / "killed", "step")] == list(
        range(1, KILLED_AFTER + 1)
    )
    shutil.copytree(folder / "killed", folder / "moved")
    return folder


@pytest.fixture
def resume(ray_address):
    def go_on(target, *settings):
        return finish(start(None, *settings, small=False, resume=target, ray=ray_address))

    return go_on


def tensors(run):
    """All that is in the newest checkpoint of a finished run, whole."""
    saved = SavedTensors(str(run / "checkpoints" / f"step-{STEPS:08d}"))
    return {key: saved.read(key) for key in saved}


def curve(run, kind="step"):
    return [event["loss"] for event in events(run, kind)]


def test_after_sigkill_of_the_driver_it_is_bit_equal_to_a_run_that_was_not_stopped(runs, resume):
    whole, killed = runs / "whole", runs / "killed"
    newest = max((killed / "checkpoints").glob("step-*/state.json")).parent
    saved = int(newest.name.removeprefix("step-"))
    assert saved in (EVERY, 2 * EVERY)  # the later one may not have been whole
    code, output = resume(killed)
    assert code == 0, output
    lost = KILLED_AFTER - saved
    assert f"Going on after step {saved} from {newest}; {lost} steps after it" in output

    assert [e["step"] for e in events(killed, "step")] == list(range(1, STEPS + 1))
    for mine, right in zip(events(killed, "step"), events(whole, "step"), strict=True):
        for key in ("rows", "tokens", "label_tokens", "loss", "learning_rate"):
            assert mine[key] == right[key], (mine["step"], key)
    assert [e["step"] for e in events(killed, "validation")] == [4, 8, 11]
    assert curve(killed, "validation") == curve(whole, "validation")
    ours, right = tensors(killed), tensors(whole)
    assert ours.keys() == right.keys() and any("exp_avg_sq" in key for key in ours)
    assert all(torch.equal(ours[key], right[key]) for key in right)

    (again,) = events(killed, "resume")
    assert (again["at_step"], again["lost_steps"]) == (saved + 1, lost)
    formed = [(e["generation"], e["at_step"]) for e in events(killed, "generation")]
    assert formed == [(1, 1), (2, saved + 1)]
    plans = (killed / "plans.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in plans] == list(range(1, STEPS + 1))


def test_lower_steps_dropped(runs):
    """wandb#4482, #9449: a resume is the same W&B run, and its steps have an axis of their own."""
    found = list(read_records(runs / "killed"))
    (_,) = [r for r in found if r.HasField("exit")]  # the killed one has no end
    ids = {r.run.run_id for r in found if r.HasField("run")}
    assert ids == {(runs / "killed" / "wandb_run_id").read_text().strip()}
    steps = [
        json.loads(item.value_json)
        for r in found
        if r.HasField("history")
        for item in r.history.item
        if "train/step" in (item.key, *item.nested_key)
    ]
    assert set(range(7, STEPS + 1)) <= set(steps)
    assert len(list((runs / "killed" / "wandb").glob("offline-run-*"))) == 2


def test_from_a_url_on_another_world_the_losses_and_rows_are_the_same(runs, resume):
    """All that is left of the run are its checkpoints; the new ones go to a URL too."""
    checkpoints, url = runs / "moved" / "checkpoints", f"file://{runs}/url"
    steps = sorted(int(p.name.removeprefix("step-")) for p in checkpoints.glob("step-????????"))
    settings = ("cluster.gpus=3", "planner.degrees=[1,2]", f"checkpoint.dir={url}")
    code, output = resume(f"file://{checkpoints}", *settings, f"run.dir={runs}/new")
    assert code == 0, output
    run, after = runs / "new" / "killed", steps[-1]
    whole = events(runs / "whole", "step")[after:]
    assert [e["step"] for e in events(run, "step")] == list(range(after + 1, STEPS + 1))
    assert [e["rows"] for e in events(run, "step")] == [e["rows"] for e in whole]
    assert curve(run) == pytest.approx([e["loss"] for e in whole], rel=1e-10)
    looks = [e["loss"] for e in events(runs / "whole", "validation") if e["step"] > after]
    assert curve(run, "validation") == pytest.approx(looks, rel=1e-10)
    assert [e["world"] for e in events(run, "generation")] == [3]
    newest = locate(f"{url}/killed", runs)
    assert (newest.state.step, newest.state.world) == (STEPS, 3)
    assert newest.location == f"{url}/killed/step-{STEPS:08d}"


def test_what_must_not_change_is_one_line(runs, resume):
    for setting, words in {
        "train.betas=[0.8, 0.9]": "train.betas was [0.9, 0.95] and is [0.8, 0.9]",
        "train.steps=11": "all 11 steps are done",
    }.items():
        code, output = resume(runs / "whole", setting)
        (line,) = [x for x in output.splitlines() if x.startswith("error:")]
        assert code == 2 and words in line and "Traceback" not in output
    assert (runs / "whole" / "events.jsonl").exists()
