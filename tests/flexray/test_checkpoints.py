"""The folder of checkpoints: only whole ones are found, the newest are kept."""

from __future__ import annotations

import json
from pathlib import Path

import fsspec
import pytest

from flexray.checkpoints import CheckpointFolder, RunState
from flexray.config import load_config
from flexray.errors import UserError


def state(step, **changes):
    values = {
        "step": step,
        "sampler": {"seed": 0, "draws": 8 * step},
        "counters": {"updates": step},
        "learned": {"linear": 0.1},
        "config": {"train": {"steps": 30}},
        "model": {"model_type": "llama"},
        "world": 4,
        "wandb_run_id": "abc",
    }
    return RunState(**(values | changes))


def write(folder, step, keep=2, name="shard", **changes):
    """What the ranks and the driver do."""
    location = folder.begin(step)
    fs, path = fsspec.core.url_to_fs(location)
    fs.makedirs(path, exist_ok=True)
    fs.pipe_file(f"{path}/{name}", b"weights")
    checkpoint = folder.publish(state(step, **changes))
    folder.prune(keep, step)
    return checkpoint


@pytest.fixture(params=["local", "memory"])
def folder(request, tmp_path):
    if request.param == "local":
        return CheckpointFolder(str(tmp_path / "run" / "checkpoints"))
    return CheckpointFolder(f"memory://{tmp_path.name}/checkpoints")


def test_the_newest_whole_one_is_found_and_reads_back_equal(folder):
    assert folder.steps() == [] and folder.newest() is None
    written = [write(folder, step) for step in (2, 4, 10)]
    assert folder.steps() == [4, 10]
    assert folder.newest() == folder.read(10) == written[-1]
    assert written[-1].state == state(10)
    assert written[-1].location == f"{folder.root}/step-00000010"
    with pytest.raises(UserError, match=r"no checkpoint of step 2: there are \[4, 10\]"):
        folder.read(2)


def test_one_that_is_being_written_is_not_found(folder):
    write(folder, 2)
    fs, path = fsspec.core.url_to_fs(folder.begin(4))
    fs.makedirs(path, exist_ok=True)
    fs.pipe_file(f"{path}/shard", b"half")
    assert folder.newest() == folder.read(2)
    # The next attempt starts from nothing: old shards under new metadata would load in silence.
    write(folder, 4, name="other")
    fs, path = fsspec.core.url_to_fs(folder.newest().location)
    assert sorted(name.rpartition("/")[2] for name in fs.ls(path, detail=False)) == [
        "other",
        "state.json",
    ]


def test_what_a_killed_run_left_unfinished_is_removed_by_the_next_whole_one(folder):
    fs, path = fsspec.core.url_to_fs(folder.begin(3))
    fs.makedirs(path, exist_ok=True)
    fs.pipe_file(f"{path}/shard", b"half")
    other = f"{path.rpartition('/')[0]}/mine.txt"
    fs.pipe_file(other, b"not a checkpoint")
    write(folder, 4)
    assert not fs.exists(path) and fs.exists(other)
    assert folder.steps() == [4]


def test_the_same_step_may_be_written_again(folder):
    write(folder, 2)
    write(folder, 2, name="again")
    assert folder.steps() == [2]


def test_the_one_just_written_stays_beside_newer_ones(folder):
    for step in (8, 9, 4):
        write(folder, step)
    assert folder.steps() == [4, 8, 9]


def test_a_url_of_this_machine_is_local(tmp_path):
    folder = CheckpointFolder(f"file://{tmp_path}/all")
    assert folder.is_local and not CheckpointFolder("memory://all").is_local
    assert folder.begin(3).endswith("all/step-00000003.unfinished")
    with folder.token() as path:
        assert path.parent == tmp_path / "all"


def test_a_file_shows_who_sees_the_folder(tmp_path):
    left = tmp_path / "all" / "seen-by-a-driver-that-was-killed"
    left.parent.mkdir()
    left.touch()
    with CheckpointFolder(str(tmp_path / "all")).token() as path:
        assert list((tmp_path / "all").iterdir()) == [path]
    assert not path.exists()
    with CheckpointFolder("memory://any").token() as path:
        assert path is None
    folder = CheckpointFolder(str(left.parent / "file" / "run"))
    (left.parent / "file").touch()
    with pytest.raises(UserError, match="file/run: cannot write checkpoints"), folder.token():
        pass


def test_what_cannot_be_read_is_one_line(tmp_path):
    folder = CheckpointFolder(str(tmp_path))
    write(folder, 2)
    marker = tmp_path / "step-00000002" / "state.json"
    whole = json.loads(marker.read_text())
    for content, words in {
        b"{": "not the state of a run",
        b"\x89PNG\xff": "not the state of a run",
        json.dumps(whole | {"format": 99}).encode(): "format 99, and this FlexRay reads 1",
        b'{"format": 1}': "not the state of a run",
    }.items():
        marker.write_bytes(content)
        with pytest.raises(UserError, match=words):
            folder.newest()
    marker.unlink()
    marker.mkdir()
    with pytest.raises(UserError, match=f"{tmp_path}: cannot read: "):
        folder.newest()
    with pytest.raises(UserError, match="checkpoints in ~nobody-here/x: "):
        CheckpointFolder("~nobody-here/x")
    with pytest.raises(UserError, match="checkpoints in nothing://x"):
        CheckpointFolder("nothing://x")


@pytest.mark.parametrize(
    ("given", "root"),
    [
        ("null", "/runs/one/checkpoints"),
        ("/shared", "/shared/one"),
        ("memory://bucket/all/", "memory://bucket/all/one"),
    ],
)
def test_every_run_has_a_folder_of_its_own(given, root):
    config = load_config(None, [f"checkpoint.dir={given}"])
    assert CheckpointFolder.of(config, Path("/runs/one")).root == root
