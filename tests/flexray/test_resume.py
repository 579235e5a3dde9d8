"""What is resumed, what may change, and what becomes of the logs; without training."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
from rich.console import Console

from flexray.callbacks import Callbacks
from flexray.checkpoints import CheckpointFolder
from flexray.config import Config, load_config
from flexray.datasets.errors import CorpusError
from flexray.display import Display
from flexray.errors import UserError
from flexray.events import CheckpointEvent, EventLog
from flexray.journal import Journal
from flexray.json_lines import read_json_lines
from flexray.resume import (
    LEARNED,
    check_newest,
    check_unchanged,
    cut_logs,
    learned,
    locate,
    with_learned,
)
from flexray.run_directory import RunDirectory
from flexray.solver.cost import CostModel
from flexray.trainer import Trainer
from tests.flexray.test_checkpoints import write
from tests.flexray.test_events import GENERATION, STEP

FREE = [
    "cluster.gpus=2",
    "cluster.address=auto",
    "train.steps=99",
    "train.validate_every=5",
    "train.max_nonfinite_steps=9",
    "checkpoint.every=1",
    "checkpoint.dir=/elsewhere",
    "planner.capacity=5000",
    "tracking.wandb=disabled",
    "model.attention=sdpa",
    "model.activation_checkpointing=true",
    "model.loss_chunk=7",
    "run.dir=other",
    "run.name=renamed",
]
FIXED = [
    "train.seed=1",
    "train.betas=[0.8, 0.9]",
    "train.learning_rate=0.1",
    "train.batch_sequences=4",
    "train.dtype=float64",
    "train.schedule=cosine",
    "data.max_length=99",
    "data.corpus=other",
    "data.validation=3",
    "model.config.hidden_size=128",
]


def test_keys_that_change_nothing_trained_may_change():
    saved = load_config(None, ["data.validation=3"]).to_dict()
    for override in FREE:
        config = load_config(None, ["data.validation=3", override])
        assert config.to_dict() != saved
        check_unchanged(saved, config)


@pytest.mark.parametrize("override", FIXED)
def test_all_others_must_not_change_and_the_error_names_old_and_new(override):
    saved = load_config(None, []).to_dict()
    key = override.split("=")[0]
    with pytest.raises(UserError) as error:
        check_unchanged(saved, load_config(None, [override]))
    assert f"resume: {key} was " in str(error.value) and "\n" not in str(error.value)


def test_the_error_shows_the_values():
    saved = load_config(None, []).to_dict()
    with pytest.raises(UserError, match=r"train\.betas was \[0\.9, 0\.95\] and is \[0\.8, 0\.9\]"):
        check_unchanged(saved, load_config(None, ["train.betas=[0.8, 0.9]"]))


def test_every_key_is_decided():
    """A new key of the config is one that must not change, unless resume.py says so."""
    saved = load_config(None, []).to_dict()
    assert set(saved) == set(Config.model_fields)
    with pytest.raises(UserError, match="brand_new"):
        check_unchanged(saved | {"brand_new": 1}, load_config(None, []))


def test_a_key_that_the_run_did_not_know_had_its_default():
    saved = load_config(None, []).to_dict()
    del saved["train"]["betas"], saved["model"]["attention"]
    check_unchanged(saved, load_config(None, []))
    with pytest.raises(UserError, match=r"train\.betas was \[0\.9, 0\.95\] and is \[0\.8, 0\.9\]"):
        check_unchanged(saved, load_config(None, ["train.betas=[0.8, 0.9]"]))


def run_with_checkpoint(tmp_path, *settings):
    """A run called `one` with a whole checkpoint of step 4."""
    run = RunDirectory.create(tmp_path / "runs", "one")
    run.write_config(load_config(None, [f"run.dir={tmp_path / 'runs'}", *settings]))
    config = load_config(run.config_path, [])
    folder = CheckpointFolder.of(config, run.path)
    write(folder, 4, config=config.to_dict())
    return run, folder


def test_a_run_is_found_by_folder_by_name_and_by_its_checkpoints(tmp_path):
    run, folder = run_with_checkpoint(tmp_path)
    runs = tmp_path / "runs"
    for target in (str(run.path), "one", folder.root, f"file://{folder.root}"):
        found = locate(target, runs)
        assert (found.state.step, found.state.counters) == (4, {"updates": 4})
        assert found.location.endswith(f"{folder.root}/step-00000004")


def test_what_is_not_found_is_one_line(tmp_path):
    run = RunDirectory.create(tmp_path, "empty")
    run.write_config(load_config(None, []))
    with pytest.raises(UserError, match=r"empty/checkpoints: there is no whole checkpoint yet"):
        locate("empty", tmp_path)
    with pytest.raises(UserError, match="nowhere: neither a run's folder, nor a run in"):
        locate("nowhere", tmp_path)
    for target in ("~nobody-here/x", "x" * 300):
        with pytest.raises(UserError) as error:
            locate(target, tmp_path)
        assert target in str(error.value) and "\n" not in str(error.value)


def test_the_trainer_goes_on_with_the_saved_config(tmp_path):
    run, _ = run_with_checkpoint(tmp_path)
    trainer = Trainer(resume=run.path, overrides=["train.steps=50"])
    assert (trainer.config.run.name, trainer.config.run.dir) == ("one", run.path.parent)
    assert trainer.config.train.steps == 50 and trainer.resume.state.step == 4
    with pytest.raises(UserError, match="all 4 steps are done: for more, give a larger"):
        Trainer(resume=run.path, overrides=["train.steps=4"])
    with pytest.raises(UserError, match=r"train\.seed was 0 and is 5"):
        Trainer(resume=run.path, overrides=["train.seed=5"])
    with pytest.raises(UserError, match=r"run\.name is two and the run to go on with is one"):
        Trainer(resume=run.path, overrides=["run.name=two"])
    run.path.rename(run.path.with_name("renamed"))
    assert Trainer(resume=run.path.with_name("renamed")).config.run.name == "renamed"
    with pytest.raises(UserError, match=r"--profile 3:9: this run trains steps 5 to 30"):
        Trainer(resume=run.path.with_name("renamed"), profile="3:9")


def test_other_data_under_the_old_name_are_refused_before_anything_is_written(tmp_path):
    run, _ = run_with_checkpoint(tmp_path)
    with EventLog(run.events_path) as log:
        for event in steps(1, 2, 3, 4, 5):
            log.write(event)
    before = {path: path.read_bytes() for path in run.path.iterdir() if path.is_file()}
    with pytest.raises(CorpusError, match="sampler"):  # its cursor is not of these corpora
        Trainer(resume=run.path, display=Display(Console(quiet=True))).train()
    assert {path: path.read_bytes() for path in run.path.iterdir() if path.is_file()} == before


@pytest.mark.parametrize("dir", ["null", "shared"])
def test_an_older_checkpoint_of_a_run_that_has_gone_on_is_refused(tmp_path, dir):
    """It would take the run's later steps and, once it has a checkpoint, that too."""
    setting = f"checkpoint.dir={dir if dir == 'null' else tmp_path / dir}"
    run, folder = run_with_checkpoint(tmp_path, setting)
    copy = tmp_path / "copy"
    shutil.copytree(folder.root, copy)
    write(folder, 8, config=load_config(run.config_path, []).to_dict())
    elsewhere = f"checkpoint.dir={tmp_path / 'elsewhere'}"
    for overrides in ([], [elsewhere]):
        trainer = Trainer(resume=copy, overrides=overrides, display=Display(Console(quiet=True)))
        with pytest.raises(UserError, match=f"has gone on to step 8 in {folder.root}: ") as error:
            trainer.train()
        assert f"--resume {run.path}, or give another run.dir" in str(error.value)
    assert folder.steps() == [4, 8] and not run.events_path.exists()
    # In folders of its own, or where the run has gone no further, it may go on.
    other = Trainer(resume=copy, overrides=[f"run.dir={tmp_path / 'new'}", elsewhere])
    check_newest(other.resume, other.config, RunDirectory.open(tmp_path / "new", "one"))
    again = Trainer(resume=run.path)
    check_newest(again.resume, again.config, run)


def test_a_renamed_run_is_found_in_a_shared_folder_of_checkpoints(tmp_path):
    run, folder = run_with_checkpoint(tmp_path, f"checkpoint.dir={tmp_path / 'shared'}")
    renamed = run.path.rename(run.path.with_name("renamed"))
    trainer = Trainer(resume=renamed)
    assert trainer.resume == folder.newest() and trainer.config.run.name == "renamed"
    check_newest(trainer.resume, trainer.config, RunDirectory(renamed))


def test_the_config_tells_of_a_new_folder_once_a_checkpoint_is_there(tmp_path):
    run, folder = run_with_checkpoint(tmp_path)
    trainer = Trainer(resume=run.path, overrides=[f"checkpoint.dir={tmp_path / 'new'}"])
    display = Display(Console(quiet=True))
    journal = Journal(trainer.config, run, display, Callbacks(), trainer.resume)
    with journal:
        assert locate("one", run.path.parent).location.startswith(folder.root)
        checkpoint = write(CheckpointFolder.of(trainer.config, run.path), 6)
        location = checkpoint.location
        journal.checkpoints(
            [CheckpointEvent(step=6, location=location, blocked_s=0.0, write_s=0.0)]
        )
        assert locate("one", run.path.parent) == checkpoint


def test_logs_are_cut_as_if_the_run_had_stopped_at_the_checkpoint(tmp_path):
    run = RunDirectory.create(tmp_path, "one")
    second = dataclasses.replace(GENERATION, generation=2, at_step=3)
    third = dataclasses.replace(GENERATION, generation=3, at_step=5)
    with EventLog(run.events_path) as log:
        for event in (GENERATION, *steps(1, 2), second, *steps(3, 4), third, *steps(5, 6)):
            log.write(event)
    with run.plans_path.open("w") as file:
        file.writelines(json.dumps({"step": step}) + "\n" for step in range(1, 7))
    with run.events_path.open("a") as file:
        file.write('{"kind": "step", "step": 7')  # the crash came here
    before = list(read_json_lines(run.events_path))

    # Of a run that goes on by itself only what is made again: memberships have been.
    shutil.copytree(run.path, tmp_path / "alive")
    alive = RunDirectory(tmp_path / "alive")
    assert cut_logs(alive, 4, only=("step", "validation")) == (2, 3)
    kinds = [
        (e["kind"], e.get("step", e.get("at_step"))) for e in read_json_lines(alive.events_path)
    ]
    assert kinds == [
        (e["kind"], e.get("step", e.get("at_step"))) for e in before if e.get("step", 0) < 5
    ]

    assert cut_logs(run, 4) == (2, 2)
    kept = list(read_json_lines(run.events_path))
    assert kept == before[:6]
    assert [plan["step"] for plan in read_json_lines(run.plans_path)] == [1, 2, 3, 4]
    assert cut_logs(run, 4) == (0, 2)
    assert list(read_json_lines(run.events_path)) == kept
    assert cut_logs(RunDirectory.create(tmp_path, "new"), 4) == (0, 0)


def steps(*numbers):
    return [dataclasses.replace(STEP, step=number) for number in numbers]


def test_learned_times_come_back_and_memory_is_the_present_clusters():
    before = CostModel(
        quadratic=1e-6,
        linear=0.1,
        per_sequence=2.0,
        micro_step_ms=3.0,
        exchange_mb_per_token=0.5,
        exchange_ms=4.0,
        bandwidth=((2, 5.0), (8, 6.0)),
        usable_mb=100.0,
        mb_per_token=1.0,
    )
    kept = json.loads(json.dumps(learned(before)))
    now = CostModel(quadratic=9.0, linear=9.0, usable_mb=777.0, mb_per_token=2.0)
    after = with_learned(now, kept)
    assert all(getattr(after, name) == getattr(before, name) for name in LEARNED)
    assert (after.usable_mb, after.mb_per_token) == (777.0, 2.0)
