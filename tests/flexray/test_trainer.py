"""The Python API: own model, own loss, callbacks; two runs in one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import flexray
from flexray.config import load_config
from flexray.errors import UserError
from tests.flexray.runs import SMALL, events

# Several whole runs, each with a Ray of its own: seconds, but for a machine that does much else.
pytestmark = pytest.mark.timeout(600)

PROGRAM = """
import json, psutil, sys, threading
import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM
from flexray import Callback, Trainer
from flexray.errors import RunFailed

class Wider(LlamaForCausalLM):
    "A model of one's own: another activation."
    def __init__(self, config):
        config.hidden_act = "gelu"
        super().__init__(config)

def scaled(logits, labels):
    return 0.5 * F.cross_entropy(logits, labels, reduction="none")

heard = []

class Listen(Callback):
    def on_generation(self, event): heard.append(["generation", event.generation, event.world])
    def on_commit(self, step): heard.append(["commit", step])
    def on_step(self, event):
        heard.append(["step", event.step])
        if event.step == 2:
            threading.Thread(target=trainer.stop).start()

class Broken(Callback):
    def on_commit(self, step):
        raise KeyError("no\\nsuch key")

train = {"steps": 100000, "dtype": "float64"}
config = {"run": {"dir": sys.argv[1], "name": "own"}, "train": train}
trainer = Trainer(config, model=Wider, loss=scaled, callbacks=[Listen()], overrides=sys.argv[2:])
result = trainer.train()
config["run"]["name"] = "broken"
try:
    Trainer(config, callbacks=[Broken()], overrides=sys.argv[2:]).train()
except RunFailed as error:
    failure = [str(error), repr(error.__cause__)]
_, left = psutil.wait_procs(psutil.Process().children(recursive=True), timeout=10)
names = [process.name() for process in left]
told = {"steps": result.steps, "loss": result.loss, "stopped": result.stopped}
told |= {"path": str(result.path), "heard": heard, "failure": failure, "left": names}
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, folder, *SMALL, "cluster.gpus=2"],
        capture_output=True,
        text=True,
        timeout=250,
        env=os.environ | {"RAY_AUTH_MODE": "disabled", "WANDB_MODE": "offline"},
    )
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout.splitlines()[-1])


def test_callbacks_hear_of_steps_commits_and_generations(ran):
    folder, result = ran
    steps = [n for kind, n, *_ in result["heard"] if kind == "step"]
    assert result["heard"][0] == ["generation", 1, 2]
    assert result["heard"][1:] == [[kind, n] for n in steps for kind in ("step", "commit")]
    assert steps == [event["step"] for event in events(folder / "own", "step")]


def test_stop_ends_a_run_with_a_checkpoint(ran):
    folder, result = ran
    assert result["stopped"] and 2 <= result["steps"] < 100
    assert result["path"] == str(folder / "own")
    assert result["loss"] == events(folder / "own", "step")[-1]["loss"]
    assert [e["step"] for e in events(folder / "own", "checkpoint")] == [result["steps"]]


def test_the_own_model_and_loss_were_trained(ran):
    folder, _ = ran
    own, plain = (events(folder / name, "step")[0]["loss"] for name in ("own", "broken"))
    assert own == pytest.approx(plain / 2, rel=0.05) and own != plain / 2


def test_an_error_in_a_callback_ends_the_run_with_one_line_that_names_it(ran):
    _, result = ran
    message, cause = result["failure"]
    assert (
        message.startswith("Broken.on_commit failed at step 1: KeyError: ") and "\n" not in message
    )
    assert cause.startswith("KeyError(")
    assert not [name for name in result["left"] if name.startswith("ray")]


def test_a_config_is_a_mapping_a_path_or_a_config(tmp_path):
    config = load_config(None, ["train.steps=7", "train.betas=[0.5, 0.6]"])
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml())
    for given in (config, config.to_dict(), path, str(path), {"train": config.train.model_dump()}):
        assert flexray.Trainer(given).config.train == config.train
    assert flexray.Trainer({"model": {"path": tmp_path}}).config.model.path == tmp_path
    assert flexray.Trainer().config == load_config(None, [])
    with pytest.raises(UserError, match="unknown key trian"):
        flexray.Trainer({"trian": {}})
    with pytest.raises(UserError, match="config: only what YAML can hold"):
        flexray.Trainer({"train": {"steps": object()}})


def test_a_place_for_checkpoints_is_checked_before_a_folder_is_made(tmp_path):
    for setting in ("foo://x", "~nobody-here/x"):
        overrides = [f"run.dir={tmp_path}", "run.name=a", f"checkpoint.dir={setting}"]
        with pytest.raises(UserError, match=f"checkpoints in {setting}/a: "):
            flexray.Trainer(overrides=overrides)
    assert not list(tmp_path.iterdir())


def test_a_stop_is_heard_before_the_run_begins(monkeypatch):
    trainer = flexray.Trainer()
    trainer.stop()
    given = []

    class Begins(Exception):
        pass

    def driver(*args, stop, **keys):
        given.append(stop.requested)
        raise Begins

    monkeypatch.setattr("flexray.trainer.prepare", lambda *args: None)
    monkeypatch.setattr("flexray.trainer.Driver", driver)
    with pytest.raises(Begins):
        trainer.train()
    assert given == [True]


@pytest.mark.parametrize("text", ["0:3", "5:4", "a", "1:2:3", "-1", "", "9" * 5000])
def test_steps_to_profile_are_checked(text):
    from flexray.profiling import Steps

    with pytest.raises(UserError, match="give steps such as 5:8"):
        Steps.parse(text)


def test_steps_to_profile():
    from flexray.profiling import Steps

    assert Steps.parse("5:8") == Steps(5, 8) and Steps.parse("5") == Steps(5, 5)
    with pytest.raises(UserError, match=r"--profile 5:31: this run trains steps 1 to 30"):
        flexray.Trainer(profile="5:31")


def test_the_package_offers_the_api_without_loading_it():
    program = "import flexray, sys; print('torch' in sys.modules, *flexray.__all__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["False", "Callback", "Trainer", "__version__"]
    with pytest.raises(AttributeError, match="no attribute 'Trianer'"):
        flexray.Trianer  # noqa: B018
