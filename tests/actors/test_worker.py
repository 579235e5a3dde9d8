"""The worker over many generations, without Ray: real processes that die, swap ranks, leave, join.

Whatever happens, the losses are those of a run in which nothing did.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import threading
import time
import weakref
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from flexray.actors import engine as engine_module
from flexray.actors import rendezvous, replication, reshard
from flexray.actors.checkpoint import CheckpointFailed
from flexray.actors.engine import StaleGeneration
from flexray.actors.lora import Lora
from flexray.actors.membership import newest_copies
from flexray.actors.rendezvous import CollectiveFailed
from flexray.actors.seat import Initial, Saved, Seat
from flexray.actors.settings import EngineSettings
from flexray.actors.worker import Worker
from flexray.solver.communicators import CommunicatorCache
from tests.actors.models import config, label_tokens, sequences, work_of
from tests.worlds import run_world

BATCH = sequences([40, 9, 23, 5, 17, 31, 2, 60])
MODEL = config("qwen3", head_dim=4, tie_word_embeddings=True)
SETTINGS = {"dtype": "float64", "timeout_s": 60, "schedule": "cosine", "steps": 60}


class Rows:
    """A data source of `BATCH`."""

    def open(self):
        return self

    def read(self, row):
        return BATCH[row]


class Member:
    """One process of a run, which plays its part of the driver's too."""

    def __init__(self, number, store, **settings):
        plain = Worker.__ray_metadata__.modified_class  # as Ray runs it
        keys = {"model": MODEL} | SETTINGS | settings
        self.worker = plain(EngineSettings(**keys), Rows(), "cpu")
        self.number, self.store = number, store
        self.members, self.generation, self.step = (), -1, 0
        self.owners, self.losses = {}, {}
        self.size = settings.get("shard_size")

    @property
    def rank(self):
        return self.members.index(self.number)

    def begin(self, members):
        self.join(members, members, Initial())

    def join(self, members, participants, origin):
        self.generation += 1
        self.members = tuple(members)
        self.owners[self.generation] = self.size or len(members)
        self.step = origin.step
        self.communicators = CommunicatorCache(16)
        return self.worker.join(
            Seat(
                generation=self.generation,
                rank=participants.index(self.number),
                world=len(members),
                participants=len(participants),
                host=self.store.host,
                port=self.store.port,
                buddy=1,
                origin=origin,
            )
        )

    def train(self, until):
        world = len(self.members)
        groups = [((r,), tuple(range(r, len(BATCH), world))) for r in range(world)]
        if world > 1:  # a gang
            groups = [((0, 1), tuple(range(len(BATCH))))]
        while self.step < until:
            work = work_of(
                self.rank,
                [groups],
                label_tokens(BATCH),
                self.communicators,
                step=self.step + 1,
                generation=self.generation,
            )
            self.losses[self.step + 1] = self.worker.step(work).loss
            self.step += 1

    def move(self, members, among):
        """To a generation of `members`, from the newest state that `among` hold."""
        held = self.worker.leave().holdings
        name = f"holdings/{self.generation + 1}"
        self.store.set(f"{name}/{self.number}", pickle.dumps((held, self.owners)))
        self.store.wait([f"{name}/{other}" for other in among])
        found = {n: pickle.loads(self.store.get(f"{name}/{n}")) for n in among}
        participants = [*members, *(n for n in among if n not in members)]
        owners = found[among[0]][1]
        holdings = {n: h for n, (h, _) in found.items()}
        self.owners = dict(owners)
        self.generation = max(owners)
        origin = newest_copies(holdings, owners, participants)
        assert origin is not None, holdings
        return self.join(members, participants, origin)


def open_things():
    return tuple(len(list(Path(f"/proc/self/{kind}").iterdir())) for kind in ("fd", "task"))


def undisturbed(rank, world, store, settings):
    member = Member(rank, store, **settings)
    member.begin(range(world))
    member.train(12)
    member.worker.leave()
    return member.losses


@pytest.fixture(scope="module")
def losses():
    return run_world(2, undisturbed, {})[0]


def swapping(rank, world, store, generations):
    """Every generation the processes swap ranks."""
    member = Member(rank, store)
    member.begin(range(world))
    member.train(2)
    counts = []
    for number in range(1, generations):
        until = 2 + number // 3
        member.train(until)
        member.worker.settle(member.step)
        members = [(r + number) % world for r in range(world)]
        member.move(members, range(world))
        counts.append(open_things())
    member.train(12)
    member.worker.leave()
    counts.append(open_things())
    return member.losses, counts


def test_thirty_generations_of_swapped_ranks_leave_nothing_and_train_as_one(losses):
    for found, counts in run_world(2, swapping, 30):
        assert found == losses  # bit for bit
        descriptors, threads = counts[4]
        assert all(d <= descriptors and t <= threads for d, t in counts[5:]), counts
        assert counts[-1][0] < descriptors and counts[-1][1] < threads


def killed(rank, world, store, settings):
    """3 ranks; rank 1 is killed in a backward pass. Then 2, and, when a new one has come, 3 again.

    The process of rank 3 waits until then.
    """
    member = Member(rank, store, **settings)
    freed = None
    if rank < 3:
        member.begin(range(3))
        member.train(4)
        if rank == 1:
            layer = member.worker.engine.model.layers[0]
            layer.register_full_backward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        began = time.perf_counter()
        with pytest.raises(CollectiveFailed) as failure:
            member.train(8)
        freed = time.perf_counter() - began
        assert "\n" not in str(failure.value) and member.worker.engine is None
        report = member.move((0, 2), (0, 2))
        assert member.step in (3, 4) and report.copies_mb > 0
        member.train(7)
        member.worker.settle(7)
    else:
        member.generation = 1
    member.move((0, 2, 3), (0, 2, 3))
    member.train(9)
    member.worker.settle(9)
    # Process 0 leaves, and serves what it has.
    member.move((3, 2), (0, 2, 3))
    if rank != 0:
        member.train(12)
    held = member.worker.leave().holdings
    return member.losses, freed, len(held)


@pytest.mark.parametrize("settings", [{}, {"lora": Lora(3, 12.0)}], ids=["all", "adapters"])
def test_a_run_goes_on_after_a_kill_and_takes_in_and_lets_go_of_processes(settings):
    right = run_world(2, undisturbed, settings)[0]
    results = run_world(4, killed, settings, dying=[1])
    for rank in (0, 2, 3):
        losses, freed, held = results[rank]
        assert held >= 1
        assert {step: pytest.approx(right[step], rel=1e-12) for step in losses} == losses
        assert freed is None or freed < 30  # of a time-out of 60 s
    assert sorted(results[2][0]) == list(range(1, 13))
    assert results[0][0].keys() == set(range(1, 10)) and results[3][0].keys() == {8, 9, 10, 11, 12}


def one_fails(rank, world, store):
    """Rank 1 cannot read a row in step 3; all processes live, and go on in a new generation."""
    member = Member(rank, store)
    member.begin(range(world))
    member.train(2)
    if rank == 1:
        member.worker.engine.read_row = {}.__getitem__
    with pytest.raises(CollectiveFailed) as failure:
        member.train(3)
    with pytest.raises(StaleGeneration):
        member.train(3)
    member.move(range(world), range(world))
    assert member.step == 2
    member.train(4)
    member.worker.leave()
    return str(failure.value), member.losses


def test_an_error_on_one_rank_ends_the_step_on_all(losses):
    results = run_world(3, one_fails)
    assert results[1][0].startswith("KeyError: ")
    for _, found in results:
        assert found == {step: pytest.approx(losses[step], rel=1e-12) for step in (1, 2, 3, 4)}


def shards(rank, world, store):
    """Two pairs of replicas; one of each pair is killed, and two ranks are left of four."""
    member = Member(rank, store, shard_size=2)
    member.begin(range(world))
    member.train(3)
    if rank in (1, 2):
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CollectiveFailed):
        member.train(4)
    report = member.move((3, 0), (0, 3))
    member.train(5)
    member.worker.leave()
    return member.losses, report.sent_mb


def test_replicas_restore_from_one_anothers_copies(losses):
    results = run_world(4, shards, dying=[1, 2])
    for rank in (0, 3):
        found, sent = results[rank]
        assert found == {step: pytest.approx(losses[step], rel=1e-12) for step in range(1, 6)}
        assert sent > 0  # they have swapped ranks


def from_a_checkpoint(rank, world, store, folder):
    """Saves after 3 steps, trains on, and goes back to it in a new generation."""
    member = Member(rank, store)
    member.begin(range(world))
    member.train(3)
    counters = member.worker.save(str(folder)).counters
    member.train(5)
    member.worker.settle(5)
    assert member.worker.written() == ""
    member.join(range(world), range(world), Saved(str(folder), 3, counters))
    held = {(h.generation, h.step) for h in member.worker.leave().holdings}
    member.join(range(world), range(world), Saved(str(folder), 3, counters))
    before = member.losses.copy()
    member.train(5)
    member.worker.leave()
    return held, before, member.losses


def test_a_generation_starts_from_a_checkpoint_and_drops_older_copies(tmp_path):
    for held, before, again in run_world(2, from_a_checkpoint, tmp_path / "step-3"):
        assert held == {(1, 3)}
        assert before == again  # bit for bit


def dies_while_writing(rank, world, store, folder):
    """Rank 1 is killed once its file of a checkpoint is written and before it is synced."""
    member = Member(rank, store)
    member.begin(range(world))
    member.train(2)
    if rank == 1:
        os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    member.worker.save(str(folder))
    with pytest.raises(CollectiveFailed):
        while True:
            member.train(member.step + 1)
    began = time.perf_counter()
    why = member.worker.written()
    waited = time.perf_counter() - began
    member.move((2, 0), (0, 2))
    went_on = member.step
    member.train(went_on + 2)
    member.worker.leave()
    return member.losses, went_on, why, waited


def test_a_kill_while_a_checkpoint_is_written_ends_the_writing_and_the_run_goes_on(
    tmp_path, losses
):
    results = run_world(3, dies_while_writing, tmp_path / "step-2", dying=[1])
    for found, went_on, why, waited in (results[0], results[2]):
        assert why and "\n" not in why and waited < 30  # of a time-out of two hours
        assert went_on >= 2 and found.keys() >= {went_on + 2}
        seen = losses.keys() & found.keys()
        assert {s: pytest.approx(losses[s], rel=1e-12) for s in seen} == {s: found[s] for s in seen}
    assert not (tmp_path / "step-2" / ".metadata").exists()


def copies_of_the_generation_before(rank, world, store):
    """How many of them there are after a move, and after the first commit that follows it."""
    member = Member(rank, store)
    member.begin(range(world))
    member.train(2)
    member.worker.settle(2)
    member.worker.leave()
    held = [weakref.ref(copy) for copy in member.worker.copies]
    member.move(range(world), range(world))
    counts = [sum(ref() is not None for ref in held)]
    member.train(3)
    counts.append(sum(ref() is not None for ref in held))
    member.worker.leave()
    return counts


def test_older_copies_are_gone_with_the_first_commit():
    # Those of the step that all go on from: a rank's own, and its ward's.
    assert run_world(2, copies_of_the_generation_before) == [[2, 0]] * 2


def settles_after_a_step_without_labels(rank, world, store):
    """Step 4 has nothing to do. Rank 1 dies while its copy of step 3 is under way."""
    member = Member(rank, store)
    member.begin(range(world))
    plain = replication._pieces

    def pieces(copy):
        if rank == 1 and copy.owner == rank and copy.tag and copy.tag.step == 3:
            time.sleep(1)  # the others are in `settle`
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(copy)

    replication._pieces = pieces
    member.train(3)
    with pytest.raises(CollectiveFailed):
        member.worker.settle(4)
    member.move((0, 2), (0, 2))
    went_on = member.step
    member.train(went_on + 1)
    member.worker.leave()
    return went_on, member.losses


def test_a_kill_in_settle_after_a_step_without_labels_leaves_a_whole_state(losses):
    results = run_world(3, settles_after_a_step_without_labels, dying=[1])
    for went_on, found in (results[0], results[2]):
        assert went_on == 2
        assert found == {step: pytest.approx(losses[step], rel=1e-12) for step in (1, 2, 3)}


def records(rank, world, store):
    """A profile that the end of its generation cuts short, and one of the next generation."""
    member = Member(rank, store)
    member.begin(range(world))
    member.worker.start_profile()
    member.train(1)
    member.worker.settle(1)
    member.worker.leave()
    records_on = torch.autograd._profiler_enabled()
    nothing = member.worker.stop_profile()
    member.move(range(world), range(world))
    member.worker.start_profile()
    member.train(2)
    trace = member.worker.stop_profile()
    again = member.worker.stop_profile()
    member.train(3)
    member.worker.leave()
    return records_on, nothing, again, len(json.loads(trace)["traceEvents"])


def test_a_profile_ends_with_its_generation():
    for records_on, nothing, again, events in run_world(2, records):
        assert not records_on and nothing == again == b""
        assert events > 100


def dies_while_loading(rank, world, store, folder):
    """Rank 1 is killed when it reads its rows of a checkpoint; the others load it again."""
    member = Member(rank, store)
    member.begin(range(world))
    member.train(2)
    counters = member.worker.save(str(folder)).counters
    assert member.worker.written() == ""
    member.train(3)
    if rank == 1:
        FileSystemReader.read_data = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    saved = Saved(str(folder), 2, counters)
    began = time.perf_counter()
    with pytest.raises(CheckpointFailed) as failure:
        member.join(range(world), range(world), saved)
    freed = time.perf_counter() - began
    assert member.worker.engine is None and member.worker.leave().holdings == ()
    member.join((2, 0), (2, 0), saved)
    before = member.losses.copy()
    member.train(4)
    member.worker.leave()
    return str(failure.value), freed, before, member.losses


def test_a_kill_while_a_checkpoint_is_loaded_frees_the_others_who_load_it_again(tmp_path, losses):
    results = run_world(3, dies_while_loading, tmp_path / "step-2", dying=[1])
    for why, freed, before, found in (results[0], results[2]):
        assert "\n" not in why and freed < 30  # of a time-out of two hours
        assert before.keys() == {1, 2, 3}
        assert found == {step: pytest.approx(losses[step], rel=1e-12) for step in (1, 2, 3, 4)}


def builds_slowly(rank, world, store, timeout_s):
    """Rank 1 takes longer to build than a collective may take; rank 2 only serves its copies."""
    member = Member(rank, store, timeout_s=timeout_s)
    member.begin(range(world))
    member.train(1)
    member.worker.settle(1)
    if rank == 1:
        plain = engine_module.build
        engine_module.build = lambda *args, **keys: (
            time.sleep(1.5 * timeout_s),
            plain(*args, **keys),
        )[1]
    member.move((0, 1), range(world))
    if rank < 2:
        member.train(2)
    member.worker.leave()
    return member.losses


def test_ranks_wait_for_one_that_builds_for_long(losses):
    for rank, found in enumerate(run_world(3, builds_slowly, 8)):
        steps = (1, 2) if rank < 2 else (1,)
        assert found == {step: pytest.approx(losses[step], rel=1e-12) for step in steps}


def sends_slowly(rank, world, store, seconds):
    """A message of the re-shard takes longer than making a group may take."""
    member = Member(rank, store)
    member.begin(range(world))
    member.train(1)
    member.worker.settle(1)
    rendezvous.INIT_TIMEOUT = timedelta(seconds=seconds)
    if rank == 1:
        plain = reshard._exchange
        reshard._exchange = lambda *args: (time.sleep(1.5 * seconds), plain(*args))[1]
    member.move((2, 0, 1), range(world))  # each lacks what it needs now
    member.train(2)
    member.worker.leave()
    return member.losses


def test_a_message_of_the_reshard_may_take_as_long_as_a_collective(losses):
    for found in run_world(3, sends_slowly, 6):
        assert found == {step: pytest.approx(losses[step], rel=1e-12) for step in (1, 2)}


def leaves_while_writing(rank, world, store, folder):
    """The ranks change while rank 1 still syncs its file of a checkpoint, and save another one."""
    member = Member(rank, store)
    member.begin(range(world))
    member.train(2)
    member.worker.settle(2)
    member.move(range(world), range(world))
    member.train(3)
    before = open_things()
    plain, synced = os.fsync, threading.Event()
    if rank == 1:
        os.fsync = lambda file: (store.set("syncs", ""), synced.wait(60), plain(file))
    member.worker.save(str(folder / "step-3"))
    while not store.check(["syncs"]):
        time.sleep(0.01)
    began = time.perf_counter()
    member.worker.settle(3)
    member.worker.leave()
    why = member.worker.written()
    waited = time.perf_counter() - began
    member.move(range(world)[::-1], range(world))
    member.train(5)
    synced.set()
    member.worker.save(str(folder / "step-5"))
    whole = member.worker.written()
    deadline = time.monotonic() + 30
    while (now := open_things()) > before and time.monotonic() < deadline:
        time.sleep(0.05)
    member.worker.leave()
    return waited, why, whole, before, now, member.losses


def test_ranks_leave_while_a_checkpoint_is_written(tmp_path, losses):
    for waited, why, whole, before, now, found in run_world(2, leaves_while_writing, tmp_path):
        assert waited < 30  # of the 60 s that the file takes
        assert why == "the ranks changed while it was written" and whole == ""
        assert now[0] <= before[0] and now[1] <= before[1]
        assert found == {step: losses[step] for step in (1, 2, 3, 4, 5)}
    assert not (tmp_path / "step-3" / ".metadata").exists()
    assert (tmp_path / "step-5" / ".metadata").exists()
