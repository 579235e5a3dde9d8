"""The pool on a cluster of two simulated nodes: generations that follow one another."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
import ray

from flexray.actors.crew import ImpossibleRequest, PoolError
from flexray.actors.membership import Membership
from flexray.actors.pool import Broken, Pool
from flexray.actors.seat import Initial
from flexray.actors.settings import EngineSettings
from flexray.actors.work import slices
from flexray.solver.communicators import CommunicatorCache
from flexray.solver.cost import CostModel
from flexray.solver.planner import plan_step
from tests.actors.models import config

COST = CostModel(quadratic=1e-4, linear=0.05, tokens_per_gpu=400)
SETTINGS = EngineSettings(model=config(vocab_size=256), dtype="float64", steps=50, timeout_s=20)


class Run:
    """Steps one after another over all rows, whoever makes them."""

    def __init__(self, pool, data):
        self.pool, self.documents = pool, data.open()
        self.losses = {}

    def begin(self, number, origin):
        self.generation = self.pool.form(number, origin)
        self.communicators = CommunicatorCache(4)
        return self.generation

    def send(self, step):
        plan = plan_step(self.documents.lengths.tolist(), COST, self.generation.cluster, (1, 2, 4))
        groups = [g.ranks for m in plan.micro_steps for g in m.groups]
        return self.pool.dispatch(
            slices(
                plan,
                tuple(range(self.documents.rows)),
                world=self.generation.world,
                step=step,
                generation=self.generation.number,
                label_tokens=int(self.documents.label_tokens.sum()),
                changes=self.communicators.prepare(groups),
            )
        )

    def step(self, step):
        reports = self.pool.wait(self.send(step), "step")
        assert len({report.loss for report in reports}) == 1
        self.losses[step] = reports[0].loss
        return reports

    @property
    def pids(self):
        return [place.pid for place in self.generation.places]


@pytest.fixture(scope="module")
def undisturbed(two_nodes, five_texts):
    """Losses of eight steps on one rank."""
    with Pool(Membership(1, 1), "cpu", SETTINGS, five_texts) as pool:
        pool.start()
        run = Run(pool, five_texts)
        run.begin(1, Initial())
        for step in range(1, 9):
            run.step(step)
    return run.losses


def until(condition, pool, timeout_s=60):
    """Watches until the pool has heard of something."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
        pool.watch()


def test_a_rank_that_dies_is_named_the_others_go_on_and_another_one_comes(
    two_nodes, five_texts, undisturbed
):
    membership = Membership(4, 1)
    with Pool(membership, "cpu", SETTINGS, five_texts) as pool:
        pool.start()
        run = Run(pool, five_texts)
        generation = run.begin(1, Initial())
        assert generation.cluster.node_sizes == (2, 2)
        nodes = [place.node for place in generation.places]
        assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
        assert [report.rank for report in run.step(1)] == [0, 1, 2, 3]
        run.step(2)

        before = run.pids
        os.kill(before[2], signal.SIGKILL)
        with pytest.raises(
            Broken, match=r"rank 2 died during step|rank \d failed during step"
        ) as error:
            run.step(3)
        assert "\n" not in str(error.value)
        losses = pool.regroup()
        assert (losses.dead, losses.hung, losses.cause) == ((2,), (), "death")
        assert str(losses) == "rank 2 died"
        copies = pool.newest_copies()
        assert copies.generation == 1 and copies.step == 2 and copies.owners == 4
        pool.watch()
        assert len(pool._crew.actors) == 3  # survivors go on before another actor starts
        run.begin(2, copies)
        pool.watch()
        assert len(pool._crew.actors) == 4
        assert run.pids == [pid for pid in before if pid != before[2]]  # the same processes
        for step in (3, 4):
            run.step(step)

        until(lambda: pool.change == "scale", pool)  # its replacement has come
        pool.settle(4)
        assert not pool.regroup()
        assert pool.newest_copies().step == 4
        joined = run.begin(3, pool.newest_copies())
        assert joined.world == 4 and set(run.pids) > set(before) - {before[2]}
        assert all(report.restore_s > 0 for report in joined.joined)
        run.step(5)

        membership.target = 1  # three leave, with copies of three owners
        assert pool.change == "scale"
        pool.settle(5)
        assert not pool.regroup()
        run.begin(4, pool.newest_copies())
        assert run.generation.world == 1 and run.pids[0] in before
        run.step(6)
        pool.settle(6)  # alone it has no copy before it is asked for one
        membership.target = 2
        until(lambda: pool.change == "scale", pool)
        assert not pool.regroup()
        run.begin(5, pool.newest_copies())
        for step in (7, 8):
            run.step(step)
    right = {step: undisturbed[step] for step in run.losses}
    assert run.losses == pytest.approx(right, rel=1e-12)


def test_a_stopped_rank_is_found_and_killed(two_nodes, five_texts, undisturbed):
    membership = Membership(2, 1)
    with Pool(membership, "cpu", SETTINGS, five_texts, silence_s=2) as pool:
        pool.start()
        run = Run(pool, five_texts)
        run.begin(1, Initial())
        run.step(1)
        stopped = run.pids[0]
        os.kill(stopped, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(Broken, match="rank 0 did not answer for 2 s during step"):
            run.step(2)
        losses = pool.regroup()
        assert (losses.dead, losses.hung, losses.cause) == ((), (0,), "hang")
        assert time.monotonic() - began < 15
        run.begin(2, pool.newest_copies())
        run.step(2)
        assert run.losses == pytest.approx({s: undisturbed[s] for s in (1, 2)}, rel=1e-12)
        until(lambda: not _lives(stopped), pool)


def test_a_rank_and_its_buddy_leave_nothing_to_go_on_from(two_nodes, five_texts):
    with Pool(Membership(4, 1), "cpu", SETTINGS, five_texts) as pool:
        pool.start()
        run = Run(pool, five_texts)
        run.begin(1, Initial())
        run.step(1)
        for rank in (0, 2):  # on two nodes of two, rank 2 keeps the copy of rank 0
            os.kill(run.pids[rank], signal.SIGKILL)
        with pytest.raises(Broken):
            run.step(2)
        assert pool.regroup().dead == (0, 2)
        assert pool.newest_copies() is None


def test_a_death_while_a_generation_forms(two_nodes, five_texts, undisturbed):
    membership = Membership(4, 1)
    with Pool(membership, "cpu", SETTINGS, five_texts) as pool:
        pool.start()
        run = Run(pool, five_texts)
        run.begin(1, Initial())
        run.step(1)
        os.kill(run.pids[1], signal.SIGKILL)
        with pytest.raises(Broken):
            run.step(2)
        pool.regroup()
        os.kill(run.pids[0], signal.SIGSTOP)  # of the next one: it will not come
        os.kill(run.pids[0], signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(Broken, match="during join"):
            run.begin(2, pool.newest_copies())
        assert pool.regroup().dead == (0,)
        assert time.monotonic() - began < 10  # the others did not sit out a time-out
        run.begin(3, pool.newest_copies())
        for step in (2, 3):
            run.step(step)
        assert run.generation.world == 2
        assert run.losses == pytest.approx({s: undisturbed[s] for s in (1, 2, 3)}, rel=1e-12)


def test_an_actor_that_cannot_start_is_one_line(two_nodes):
    class Unreadable:
        def open(self):
            raise OSError("no such corpus here")

    with (
        pytest.raises(PoolError, match=r"did not start: .*no such corpus here"),
        Pool(Membership(1, 1), "cpu", SETTINGS, Unreadable()) as pool,
    ):
        pool.start()


def test_an_actor_that_would_write_to_a_folder_of_its_own_is_refused(
    two_nodes, five_texts, tmp_path
):
    shared = tmp_path / "seen"
    words = rf"{tmp_path}: node \w+ does not see this folder of checkpoints"
    with (
        pytest.raises(ImpossibleRequest, match=words),
        Pool(Membership(1, 1), "cpu", SETTINGS, five_texts, shared=shared) as pool,
    ):
        pool.start()
    shared.touch()
    membership = Membership(1, 1)
    with Pool(membership, "cpu", SETTINGS, five_texts, shared=shared) as pool:
        pool.start()
        run = Run(pool, five_texts)
        run.begin(1, Initial())
        shared.unlink()  # as on a node that comes later
        membership.target = 2
        told = []
        until(lambda: told.extend(pool.news()) or told, pool)
        assert len(told) == 1 and re.match(f"an actor did not start: {words}", told[0])
        assert "another one is asked for in 2 s" in told[0]
        run.step(1)  # training goes on
        shared.touch()
        until(lambda: pool.change == "scale", pool)


def test_more_than_there_is_waits_if_it_may(two_nodes, five_texts):
    with pytest.raises(ImpossibleRequest, match="needs 9 CPUs and the cluster has 4"):
        Pool(Membership(9, 9), "cpu", SETTINGS, five_texts)
    membership = Membership(9, 2)
    with Pool(membership, "cpu", SETTINGS, five_texts, at_start=2) as pool:
        pool.start()
        assert len(pool.candidates()) == 4
    assert ray.is_initialized()


def _lives(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
