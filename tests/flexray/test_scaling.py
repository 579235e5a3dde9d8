"""`flexray scale`: what it asks for, and what it refuses in one line."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from flexray.cli import app
from flexray.config import load_config
from flexray.errors import UserError
from flexray.run_directory import RunDirectory
from flexray.scaling import Scaling, ask, check_scale


@pytest.fixture
def run(tmp_path):
    """A run that may have 2 to 6 GPUs."""
    made = RunDirectory.create(tmp_path, "first")
    limits = ["cluster.gpus=4", "cluster.min_gpus=2", "cluster.max_gpus=6", "cluster.shard_size=2"]
    made.write_config(load_config(None, limits))
    return made


def test_a_request_is_heard_once_and_the_newest_counts(run):
    ask(run, 3)  # of a process that has ended
    scaling = Scaling(run)
    assert scaling.take() is None
    ask(run, 2)
    ask(run, 4)
    assert scaling.take() == 4
    assert scaling.take() is None
    scaling.ask(6)
    assert scaling.take() == 6
    run.scale_path.write_text("{}")  # somebody's own file
    assert scaling.take() is None and not run.scale_path.exists()


@pytest.mark.parametrize(
    ("gpus", "line"),
    [
        (1, r"1 GPUs: this run goes on with 2 or more \(cluster.min_gpus\)"),
        (8, r"8 GPUs: this run may have 6 at most \(cluster.max_gpus\)"),
        (5, r"5 GPUs: must be a multiple of cluster.shard_size=2"),
    ],
)
def test_limits_of_the_config(run, gpus, line):
    section = load_config(run.config_path, []).cluster
    with pytest.raises(UserError, match=line):
        check_scale(section, gpus)
    check_scale(section, 4)
    result = CliRunner().invoke(app, ["scale", str(run.path), str(gpus)])
    assert isinstance(result.exception, UserError)


def test_the_command_asks_a_run_that_trains(run):
    with run.held():
        result = CliRunner().invoke(app, ["scale", str(run.path), "4"])
        assert result.exit_code == 0 and "asked for 4 ranks" in result.output
        assert Scaling.take(_listener(run)) == 4
    result = CliRunner().invoke(app, ["scale", str(run.path), "4"])
    assert "not training now" in str(result.exception) and "--resume" in str(result.exception)
    assert not run.scale_path.exists()


def test_an_unknown_run(tmp_path):
    result = CliRunner().invoke(app, ["scale", str(tmp_path / "none"), "4"])
    assert "neither a run's folder" in str(result.exception)


def _listener(run):
    text = run.scale_path.read_text()
    scaling = Scaling(run)
    run.scale_path.write_text(text)
    return scaling
