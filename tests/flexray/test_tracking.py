"""Against the real W&B, offline."""

import json
import os
import struct
import subprocess
import sys

import pytest
import wandb

from flexray.config import load_config
from flexray.events import StepEvent, ValidationEvent
from flexray.tracking import Tracker, wandb_mode

KEY = "k" * 40


@pytest.fixture(autouse=True)
def _logged_out(monkeypatch, tmp_path):
    for variable in [v for v in os.environ if v.startswith("WANDB_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    yield
    # W&B names its process in the environment: later tests' programs would share it.
    wandb.teardown()


def step(number, loss=1.0, step_s=2.0):
    return StepEvent(
        step=number,
        loss=loss,
        tokens=1000,
        label_tokens=990,
        rows=[3, 1],
        step_s=step_s,
        planned_s=1.9,
        plan_wait_s=0.0,
        solve_s=0.4,
        lower_bound_s=1.8,
        groups=[[4], [2, 1, 1]],
        generation=1,
        learning_rate=1e-3,
        skipped=False,
        model_version=2,
        idle=[0.1, 0.0],
    )


def records(run_dir, runs=1):
    """All records of the offline runs under a folder, `runs` of which are ended."""
    wandb.teardown()  # its process writes the last ones before it ends
    found = list(read_records(run_dir))
    assert sum(record.HasField("exit") for record in found) == runs
    return found


def read_records(run_dir):
    """Protobufs in LevelDB's log format."""
    from wandb.proto.wandb_internal_pb2 import Record

    block, header = 32768, 7
    for path in sorted(run_dir.glob("wandb/*run-*/*.wandb")):
        data, at, parts = path.read_bytes(), header, b""
        while at + header <= len(data):
            if block - at % block < header:
                at += block - at % block
            _, size, kind = struct.unpack_from("<IHB", data, at)
            parts += data[at + header : at + header + size]
            at += header + size
            if kind in (1, 4):  # a whole record, or the last part of one
                yield Record.FromString(parts)
                parts = b""


def history(run_dir, runs=1):
    return [
        {
            ".".join(item.nested_key) or item.key: json.loads(item.value_json)
            for item in r.history.item
        }
        for r in records(run_dir, runs)
        if r.HasField("history")
    ]


def test_an_offline_run_holds_config_steps_and_summary(tmp_path):
    config = load_config(None, ["tracking.project=proj", "train.steps=3"])
    warnings = []
    tracker = Tracker(config, tmp_path, "my-run", warn=warnings.append)
    assert (tracker.mode, tracker.url) == ("offline", None)
    for number in (211, 212, 201):  # a resume logs earlier steps again
        tracker.log_step(step(number, loss=number / 2), {"plan/speedup": 1.25})
    tracker.log_step(step(202, loss=float("nan"), step_s=0.0))
    tracker.log_validation(
        ValidationEvent(step=202, loss=3.25, sequences=5, label_tokens=99, validation_s=0.1)
    )
    tracker.finish({"final_loss": 100.5})
    tracker.finish()
    assert warnings == []

    rows = history(tmp_path)
    assert [row["train/step"] for row in rows] == [211, 212, 201, 202, 202]
    assert rows.pop()["validation/loss"] == 3.25
    assert (rows[0]["train/learning_rate"], rows[0]["train/skipped"]) == (1e-3, 0)
    assert rows[2]["train/loss"] == 100.5
    assert rows[2]["train/tokens_per_s"] == 500
    assert (rows[2]["plan/micro_steps"], rows[2]["plan/groups"]) == (2, 4)
    assert rows[2]["plan/speedup"] == 1.25
    assert "train/tokens_per_s" not in rows[3]

    all_records = records(tmp_path)
    (run,) = {
        (r.run.project, r.run.display_name, r.run.run_id) for r in all_records if r.HasField("run")
    }
    assert run == ("proj", "my-run", (tmp_path / "wandb_run_id").read_text().strip())
    written = {
        item.key: item.value_json
        for r in all_records
        if r.HasField("run")
        for item in r.run.config.update
    }
    assert json.loads(written["train"])["steps"] == 3
    axes = {
        (r.metric.name or r.metric.glob_name, r.metric.step_metric)
        for r in all_records
        if r.HasField("metric")
    }
    assert ("*", "train/step") in axes
    summary = {
        item.key or ".".join(item.nested_key): item.value_json
        for r in all_records
        if r.HasField("summary")
        for item in r.summary.update
    }
    assert summary["final_loss"] == "100.5"


def test_a_resumed_run_keeps_its_id(tmp_path):
    config = load_config(None, [])
    for _ in range(2):
        Tracker(config, tmp_path, "r").finish()
    ids = {r.run.run_id for r in records(tmp_path, runs=2) if r.HasField("run")}
    assert ids == {(tmp_path / "wandb_run_id").read_text().strip()}


def test_a_run_whose_folder_is_lost_keeps_its_id_too(tmp_path):
    tracker = Tracker(load_config(None, []), tmp_path, "r", run_id="from-checkpoint")
    assert tracker.run_id == "from-checkpoint"
    tracker.finish()
    assert tracker.run_id is None
    ids = {r.run.run_id for r in records(tmp_path) if r.HasField("run")}
    assert ids == {"from-checkpoint"} == {(tmp_path / "wandb_run_id").read_text().strip()}


def test_a_failure_warns_once_and_stops_nothing(tmp_path):
    warnings = []
    tracker = Tracker(load_config(None, []), tmp_path, "r", warn=warnings.append)
    wandb.run.finish()  # from here on every call of the tracker's run fails
    for number in (1, 2, 3):
        tracker.log_step(step(number))
    tracker.finish({"a": 1})
    assert len(warnings) == 1
    assert warnings[0].startswith("Weights & Biases failed, training goes on: ")


def test_a_failed_start_warns_once_and_stops_nothing(tmp_path):
    warnings = []
    config = load_config(None, ["tracking.project=not/a/name"])
    tracker = Tracker(config, tmp_path, "r", warn=warnings.append)
    tracker.log_step(step(1))
    tracker.finish({})
    assert len(warnings) == 1


def test_without_a_server_the_run_is_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setattr("flexray.tracking._START_TIMEOUT_S", 1.0)
    warnings = []
    tracker = Tracker(load_config(None, []), tmp_path, "r", warn=warnings.append)
    tracker.log_step(step(1))
    tracker.finish()
    assert len(warnings) == 1
    assert tracker.mode == "offline"
    # The attempt to reach the server is a run too, without a row.
    assert [row["train/step"] for row in history(tmp_path, runs=2)] == [1]


def test_disabled_imports_no_wandb_and_offline_prints_nothing(tmp_path):
    program = (
        "import sys, pathlib\n"
        "from flexray.config import load_config\n"
        "from flexray.events import StepEvent\n"
        "from flexray.tracking import Tracker\n"
        "config = load_config(None, [f'tracking.wandb={sys.argv[1]}'])\n"
        "tracker = Tracker(config, pathlib.Path.cwd(), 'r')\n"
        f"tracker.log_step({step(1)!r}); tracker.finish({{'a': 1}})\n"
        "print('wandb' in sys.modules)\n"
    )

    def run(mode):
        command = [sys.executable, "-c", program, mode]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout, done.stderr, (tmp_path / "wandb").exists()

    assert run("disabled") == ("False\n", "", False)
    assert run("offline") == ("True\n", "", True)


@pytest.mark.parametrize(
    ("wanted", "environment", "netrc", "mode"),
    [
        ("auto", {}, "", "offline"),
        ("auto", {"WANDB_API_KEY": KEY}, "", "online"),
        ("auto", {"WANDB_IDENTITY_TOKEN_FILE": "token"}, "", "online"),
        ("auto", {}, f"machine api.wandb.ai login user password {KEY}", "online"),
        ("auto", {}, f"machine example.org login user password {KEY}", "offline"),
        ("auto", {}, "machine api.wandb.ai what is this", "offline"),
        (
            "auto",
            {"WANDB_BASE_URL": "https://wandb.example.org"},
            f"machine wandb.example.org login user password {KEY}",
            "online",
        ),
        ("auto", {"WANDB_API_KEY": KEY, "WANDB_MODE": "disabled"}, "", "disabled"),
        ("auto", {"WANDB_MODE": "nonsense"}, "", "offline"),
        ("offline", {"WANDB_API_KEY": KEY}, "", "offline"),
        ("online", {}, "", "online"),
        ("disabled", {"WANDB_API_KEY": KEY, "WANDB_MODE": "online"}, "", "disabled"),
    ],
)
def test_mode(wanted, environment, netrc, mode, monkeypatch, tmp_path):
    (tmp_path / "netrc").write_text(netrc)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    assert wandb_mode(wanted)[0] == mode
