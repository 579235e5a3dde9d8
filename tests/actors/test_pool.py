"""The pool on a cluster of two simulated nodes: ranks by node, and one line when one dies."""

from __future__ import annotations

import os
import signal
import time

import pytest
import ray

from flexray.actors.pool import Pool, PoolError
from flexray.actors.settings import EngineSettings
from flexray.actors.work import slices
from flexray.solver.communicators import CommunicatorCache
from flexray.solver.cost import CostModel
from flexray.solver.planner import plan_step
from tests.actors.models import config

COST = CostModel(quadratic=1e-4, linear=0.05, tokens_per_gpu=200)
SETTINGS = EngineSettings(model=config(vocab_size=256), timeout_s=20)


def run_step(pool, generation, communicators, data, step):
    documents = data.open()
    plan = plan_step(documents.lengths.tolist(), COST, generation.cluster, (1, 2, 4))
    groups = [g.ranks for m in plan.micro_steps for g in m.groups]
    work = slices(
        plan,
        tuple(range(documents.rows)),
        world=generation.world,
        step=step,
        generation=generation.number,
        label_tokens=int(documents.label_tokens.sum()),
        changes=communicators.prepare(groups),
    )
    return pool.wait(pool.dispatch(work), "step")


def test_ranks_are_numbered_node_by_node_and_a_dead_one_is_named(two_nodes, five_texts):
    with Pool(4, "cpu", SETTINGS, five_texts) as pool:
        generation = pool.form(1)
        assert generation.cluster.node_sizes == (2, 2)
        nodes = [place.node for place in generation.places]
        assert nodes[0] == nodes[1] != nodes[2] == nodes[3]

        communicators = CommunicatorCache(4)
        reports = run_step(pool, generation, communicators, five_texts, 1)
        assert [report.rank for report in reports] == [0, 1, 2, 3]
        assert len({report.loss for report in reports}) == 1
        again = run_step(pool, generation, communicators, five_texts, 2)
        assert again[0].loss < reports[0].loss

        os.kill(generation.places[2].pid, signal.SIGKILL)
        with pytest.raises(PoolError, match="rank 2 died during step") as error:
            run_step(pool, generation, communicators, five_texts, 3)
        assert "\n" not in str(error.value)


def test_a_death_is_told_and_not_the_errors_that_it_causes(two_nodes):
    @ray.remote(num_cpus=0, max_restarts=0)
    class Rank:
        def fail(self):
            raise RuntimeError("connection reset by peer")

        def die(self):
            time.sleep(2)
            os._exit(1)

    neighbour, dying = Rank.remote(), Rank.remote()
    pool = Pool.__new__(Pool)
    with pytest.raises(PoolError, match="rank 1 died during step"):
        pool.wait([neighbour.fail.remote(), dying.die.remote()], "step")
    with pytest.raises(PoolError, match=r"rank 0 failed during step: .*connection reset"):
        pool.wait([neighbour.fail.remote(), neighbour.fail.remote()], "step")
