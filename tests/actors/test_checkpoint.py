"""The training state on disk: bit-equal at any world size, whole or not there.

torchtitan#811, #816 (keys that fail when the world changes): saved by 4 ranks, loaded by 1 to 8.
"""

from __future__ import annotations

import os
import re
import signal

import pytest
import torch

from flexray.actors.checkpoint import Checkpointer, CheckpointFailed, SavedTensors
from flexray.actors.lora import Lora
from flexray.solver.communicators import CommunicatorCache
from tests.actors.models import config, engine, label_tokens, sequences, work_of
from tests.worlds import run_world

BATCH = sequences([40, 9, 23, 5, 17, 31, 2, 60])
ROWS = tuple(range(len(BATCH)))
# 4 rows of a head's norm: on 8 ranks some hold none of it.
MODEL = config("qwen3", head_dim=4, tie_word_embeddings=True)


def trained(rank, world, store, steps, seed=0, **settings):
    """An engine after `steps` steps, and its checkpointer."""
    ours = engine(rank, world, store, BATCH, MODEL, dtype="float64", seed=seed, **settings)
    communicators = CommunicatorCache(16)
    for step in range(1, steps + 1):
        train(ours, communicators, step)
    return ours, Checkpointer(ours.model.model, ours.optimizer)


def train(ours, communicators, step):
    groups = [((rank,), ROWS[rank :: ours.world]) for rank in range(ours.world)]
    return ours.run_step(
        work_of(ours.rank, [groups], label_tokens(BATCH), communicators, step=step)
    ).loss


def whole_state(ours):
    """Every parameter and its optimizer state, gathered (a collective call)."""
    state = {}
    for name, parameter in ours.model.model.named_parameters():
        kinds = {"value": parameter.detach()} | ours.optimizer.state.get(parameter, {})
        for kind, value in kinds.items():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            state[name, kind] = whole.numpy().copy()
    return state


def save(rank, world, store, location, settings=None):
    """The state that was saved, and the loss of the step after it."""
    ours, checkpointer = trained(rank, world, store, 3, **(settings or {}))
    state = whole_state(ours)
    written = checkpointer.save(location)
    loss = train(ours, CommunicatorCache(16), 4)  # changes the parameters while files are written
    written()
    ours.leave()
    return state, loss


def load(rank, world, store, location, settings=None):
    ours, checkpointer = trained(rank, world, store, 0, **({"seed": 7} | (settings or {})))
    checkpointer.load(location)
    ours.updates = 3
    state = whole_state(ours)
    loss = train(ours, CommunicatorCache(16), 4)
    ours.leave()
    return state, loss


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    found = {}
    for location in (str(folder / "local"), f"file://{folder}/url"):
        found[location] = run_world(4, save, location)[0]
    return found


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_a_state_loads_bit_equal_at_any_world_size(saved, world):
    location, (state, loss) = next(iter(saved.items()))
    for found, next_loss in run_world(world, load, location):
        assert found.keys() == state.keys()
        assert {key[1] for key in found} == {"value", "step", "exp_avg", "exp_avg_sq"}
        assert all((found[key] == state[key]).all() for key in state)
        assert next_loss == pytest.approx(loss, rel=1e-13)


def test_a_url_holds_the_same(saved):
    (_, here), (location, there) = saved.items()
    assert location.startswith("file://")
    found, _ = run_world(2, load, location)[0]
    assert found.keys() == here[0].keys()
    for key, value in found.items():
        assert (value == there[0][key]).all() and (value == here[0][key]).all(), key


def test_adapters_alone_are_saved_and_load_at_another_world_size(tmp_path):
    location, settings = str(tmp_path / "lora"), {"lora": Lora(rank=3, alpha=12.0), "seed": 0}
    state, loss = run_world(4, save, location, settings)[0]
    assert all(".lora_" in key for key in SavedTensors(location))
    trained_state = {key: value for key, value in state.items() if ".lora_" in key[0]}
    assert len(trained_state) == len(list(SavedTensors(location)))
    for found, next_loss in run_world(2, load, location, settings):
        assert all((found[key] == state[key]).all() for key in state)  # the frozen ones too
        assert next_loss == pytest.approx(loss, rel=1e-13)


@pytest.mark.parametrize(("world", "shard_size"), [(2, None), (6, 2)])
def test_replicated_shards_load_at_another_world_and_shard_size(tmp_path, world, shard_size):
    location = str(tmp_path / "shards")
    state, loss = run_world(4, save, location, {"shard_size": 2})[0]
    for found, next_loss in run_world(world, load, location, {"shard_size": shard_size}):
        assert all((found[key] == state[key]).all() for key in state)
        assert next_loss == pytest.approx(loss, rel=1e-13)


def test_one_process_reads_every_tensor_whole(saved):
    for location, (state, _) in saved.items():
        tensors = SavedTensors(location)
        found = {key: tensors.read(key).numpy() for key in tensors}
        keys = {(n, k): f"optimizer.{n}.{k}" if k != "value" else f"model.{n}" for n, k in state}
        assert set(found) == set(keys.values())
        for key, value in state.items():
            assert (found[keys[key]] == value).all() and found[keys[key]].dtype == value.dtype


def load_another_model(rank, world, store, location, hf_config):
    ours = engine(rank, world, store, BATCH, hf_config, dtype="float64")
    try:
        Checkpointer(ours.model.model, ours.optimizer).load(location)
    except CheckpointFailed as error:
        return str(error)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": 3}, r".*Missing key in checkpoint .*layers\.2.*"),
        ({"vocab_size": 100}, r".*[Ss]ize mismatch.*"),
        (
            {"num_hidden_layers": 1},  # a part of what was saved
            r"it has model\.model\.layers\.1\.[\w.]+ and this model does not: the checkpoint "
            r"belongs to another model",
        ),
    ],
)
def test_a_checkpoint_of_another_model_is_one_line(saved, change, words):
    location = next(iter(saved))
    another = config("qwen3", head_dim=4, tie_word_embeddings=True, **change)
    for message in run_world(2, load_another_model, location, another):
        assert re.fullmatch(f"{re.escape(location)}: cannot load: {words}", message or "loaded")


def test_a_folder_without_a_checkpoint_is_one_line(tmp_path):
    with pytest.raises(CheckpointFailed, match="no checkpoint"):
        SavedTensors(str(tmp_path))


def save_into_a_file(rank, world, store, location):
    _, checkpointer = trained(rank, world, store, 1)
    try:
        checkpointer.save(location)()
    except CheckpointFailed as error:
        return str(error)


def test_a_failed_write_is_one_line_on_every_rank(tmp_path):
    (tmp_path / "file").write_text("")
    for message in run_world(2, save_into_a_file, str(tmp_path / "file" / "step")):
        assert message and "\n" not in message


def kill_while_writing(rank, world, store, folder):
    """Rank 1 dies in its second checkpoint, once its file is written and before it is synced."""
    ours, checkpointer = trained(rank, world, store, 2)
    checkpointer.save(f"{folder}/first")()
    train(ours, CommunicatorCache(16), 3)
    if rank == 1:
        os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    try:
        checkpointer.save(f"{folder}/second")()
    except CheckpointFailed:
        return True


def test_a_rank_killed_while_writing_leaves_the_older_one_good(tmp_path):
    with pytest.raises((AssertionError, EOFError)):
        run_world(3, kill_while_writing, str(tmp_path))
    # What is not whole has no metadata, so it can be told from one that is.
    assert list(tmp_path.glob("second/*.distcp"))
    assert not (tmp_path / "second" / ".metadata").exists()
    for state, loss in run_world(2, load, str(tmp_path / "first")):
        assert torch.isfinite(torch.tensor(loss)) and state
