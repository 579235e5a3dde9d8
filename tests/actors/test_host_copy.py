"""Copies of training state in host memory: what is where, and that it is what the rank had."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flexray.actors.host_copy import (
    KINDS,
    Entry,
    HostCopy,
    Layout,
    Tag,
    entries_of,
    live_tensors,
    tensors_to_restore,
)
from flexray.actors.lora import Lora
from flexray.actors.optimizer import adamw
from flexray.actors.seat import Holding
from flexray.solver.communicators import CommunicatorCache
from tests.actors.models import config, engine, label_tokens, sequences, work_of
from tests.worlds import run_world

BATCH = sequences([40, 9, 23, 5, 17, 31])
# 2 rows of a head's norm: on 3 ranks one holds none of it.
MODEL = config("qwen3", head_dim=2, tie_word_embeddings=True)
ENTRIES = (
    Entry("wide", (7, 3), torch.float32),
    Entry("scalar", (), torch.float64),
    Entry("few", (2,), torch.float64),
    Entry("none", (0, 4), torch.float32),
    Entry("cube", (5, 2, 2), torch.float32),
)


@pytest.mark.parametrize("owners", [1, 2, 3, 5, 9])
def test_the_rows_of_all_owners_are_those_of_torch_chunk(owners):
    layout = Layout(ENTRIES, owners)
    for entry in ENTRIES:
        chunks = [x.tolist() for x in torch.arange(entry.rows).chunk(owners)] if entry.rows else []
        chunks += [[]] * (owners - len(chunks))
        found = [list(range(*layout.rows(entry, owner))) for owner in range(owners)]
        assert found == chunks


@pytest.mark.parametrize("owners", [1, 3, 9])
def test_the_parts_of_a_copy_fill_its_buffers_without_overlap(owners):
    layout = Layout(ENTRIES, owners)
    whole = 0
    for owner in range(owners):
        copy = HostCopy(layout, owner)
        assert {t: len(b) for t, b in copy.buffers.items()} == layout.elements(owner)
        for buffer in copy.buffers.values():
            buffer.zero_()
        for entry in ENTRIES:
            start, stop = layout.rows(entry, owner)
            for kind in KINDS:
                part = copy.view(entry.name, kind, start, stop)
                assert part.numel() == (stop - start) * entry.row_elements
                part += 1
                rows = [copy.view(entry.name, kind, r, r + 1) for r in range(start, stop)]
                assert sum(r.numel() for r in rows) == part.numel()
        assert all((buffer == 1).all() for buffer in copy.buffers.values())
        whole += copy.nbytes
    assert whole == 3 * ((21 + 20) * 4 + (1 + 2) * 8)


def test_rows_of_another_owner_are_refused():
    copy = HostCopy(Layout(ENTRIES, 3), 1)
    with pytest.raises(IndexError, match=r"wide: rows 2\.\.4 are not in 3\.\.6"):
        copy.view("wide", "parameter", 2, 4)


def test_a_copy_has_no_tag_while_it_is_written():
    copy = HostCopy(Layout(ENTRIES[:1], 1), 0)
    assert copy.holding is None
    rows = {("wide", kind): torch.arange(21.0) for kind in KINDS}
    copy.take(rows, Tag(2, 5, 4))
    assert copy.holding == Holding(generation=2, step=5, owner=0, updates=4)
    with pytest.raises(RuntimeError):
        copy.take({("wide", "parameter"): torch.zeros(20)}, Tag(2, 6, 5))
    assert copy.holding is None


def test_a_model_that_is_not_sharded_is_copied_before_its_first_step():
    model = nn.Linear(3, 4)
    model.scale = nn.Parameter(torch.tensor(1.5))
    optimizer = adamw(model.parameters(), betas=(0.9, 0.9), weight_decay=0.1)
    copy = HostCopy(Layout(entries_of(model), 1), 0)
    copy.buffers[torch.float32].fill_(7)  # of an older step
    copy.take(live_tensors(model, optimizer), Tag(0, 0, 0))
    assert torch.equal(copy.view("weight", "parameter", 1, 3), model.weight[1:3].flatten())
    assert copy.view("scale", "parameter", 0, 1).item() == 1.5
    assert not copy.view("weight", "exp_avg_sq", 0, 4).any()
    assert not optimizer.state


def copied_and_restored(rank, world, store, settings):
    """Trains, copies, trains on; puts the copy into an engine of other values, and trains on."""
    ours = engine(rank, world, store, BATCH, MODEL, dtype="float64", **settings)
    rows = range(len(BATCH))

    groups = [((r,), tuple(rows[r::world])) for r in range(world)]

    def train(who, steps):
        work = work_of(
            rank,
            [groups],
            label_tokens(BATCH),
            CommunicatorCache(1),
            generation=who.generation,
        )
        return [who.run_step(work).loss for _ in range(steps)]

    train(ours, 3)
    model = ours.model.model
    owners, owner = world, rank
    if size := settings.get("shard_size"):
        owners, owner = size, rank % size
    copy = HostCopy(Layout(entries_of(model), owners), owner)
    copy.take(live_tensors(model, ours.optimizer), Tag(0, 3, 3))
    kept = {part: x.clone() for part, x in live_tensors(model, ours.optimizer).items()}
    losses = train(ours, 2)
    ours.leave()

    other = engine(
        rank, world, store, BATCH, MODEL, generation=1, dtype="float64", **settings | {"seed": 9}
    )
    frozen = {n: p for n, p in model.named_parameters() if not p.requires_grad}
    for name, parameter in other.model.model.named_parameters():
        if name in frozen:
            parameter.to_local().copy_(frozen[name].to_local())
    places = tensors_to_restore(other.model.model, other.optimizer, 3)
    entries = {entry.name: entry for entry in copy.layout.entries}
    for (name, kind), place in places.items():
        place.copy_(copy.view(name, kind, *copy.layout.rows(entries[name], owner)))
    equal = all(torch.equal(places[part], x) for part, x in kept.items())
    other.updates = 3
    again = train(other, 2)
    other.leave()
    return equal, losses, again, len(entries)


@pytest.mark.parametrize(
    "world,settings", [(3, {}), (2, {"shard_size": 1}), (2, {"lora": Lora(2, 4.0)})]
)
def test_training_goes_on_from_a_copy_as_it_did_from_the_original(world, settings):
    results = run_world(world, copied_and_restored, settings)
    for equal, losses, again, entries in results:
        assert equal
        assert losses == again  # bit for bit
        assert entries == (28 if "lora" in settings else 24)
