import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from flexray.config import Config, load_config
from flexray.errors import UserError
from flexray.run_directory import RunDirectory


def test_a_named_run(tmp_path):
    run = RunDirectory.create(tmp_path / "deep" / "runs", "first")
    assert run.path == tmp_path / "deep" / "runs" / "first"
    assert run.path.is_dir()
    assert run.name == "first"
    assert {run.config_path.parent, run.events_path.parent, run.plans_path.parent} == {run.path}


def test_runs_without_a_name_get_a_time_stamp_each(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        runs = list(pool.map(lambda _: RunDirectory.create(tmp_path, None), range(24)))
    assert len({run.path for run in runs}) == 24
    assert all(re.fullmatch(r"\d{8}-\d{6}(-\d+)?", run.name) for run in runs)


def test_a_run_is_never_written_over(tmp_path):
    RunDirectory.create(tmp_path, "twice").events_path.write_text("kept")
    with pytest.raises(UserError, match=r"twice is there already: choose another run\.name"):
        RunDirectory.create(tmp_path, "twice")
    assert (tmp_path / "twice" / "events.jsonl").read_text() == "kept"


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file.*: cannot make this folder: "):
        RunDirectory.create(tmp_path / "file" / "runs", "x")


def test_the_config_written_is_the_runs_own(tmp_path):
    run = RunDirectory.create(tmp_path, None)
    config = load_config(None, ["train.steps=3"])
    run.write_config(config)
    assert load_config(run.config_path, []) == config.named(run.name)
    assert load_config(run.config_path, []) != Config()


def test_a_run_is_trained_by_one_process_at_a_time(tmp_path):
    run = RunDirectory.create(tmp_path, "one")
    again = RunDirectory.open(tmp_path, "one")
    program = (
        "import os, sys, pathlib\n"
        "from flexray.run_directory import RunDirectory\n"
        "with RunDirectory(pathlib.Path(sys.argv[1])).held():\n"
        "    print('held', flush=True); sys.stdin.read()\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", program, run.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdout.readline() == b"held\n"
    with pytest.raises(UserError, match="one: this run is training now, in another process"):
        again.held().__enter__()
    other.kill()
    other.communicate()
    for _ in range(2):
        with again.held():
            pass
    assert list(run.path.iterdir()) == []


def test_a_run_that_goes_on_is_made_where_its_folder_is_lost(tmp_path):
    assert RunDirectory.open(tmp_path / "deep", "lost").path.is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot make this folder"):
        RunDirectory.open(tmp_path / "file", "run")
