"""The tight bound on batches of real lengths, and the CPU time that it may take."""

from __future__ import annotations

import time

import pulp

from flexray.jobs.planner_cases import Case
from flexray.presets import load_preset
from flexray.solver import milp
from flexray.solver.bound import COARSE, _dual_bound
from flexray.solver.cluster import Cluster
from flexray.solver.planner import plan_step
from flexray.solver.problem import Problem


def test_a_micro_step_of_single_gpus_is_bounded_well() -> None:
    """Without McCormick's envelope of groups times time the gap is 3.2%."""
    lengths, cluster, degrees = Case("wikipedia", 4).lengths(), Cluster.uniform(64), range(1, 65)
    cost = load_preset("gpt-7b-a100-40g").with_max_length(192_000).cost
    legal = [d for d in degrees if 64 % d == 0]
    plan = plan_step(lengths, cost, cluster, legal)
    problem = Problem.of(lengths, cost, cluster, legal)
    bound = _dual_bound(problem, plan.planned_ms, COARSE, [], nodes=2000, limit_s=60.0)
    assert bound <= plan.planned_ms < 1.02 * bound


def test_a_limit_of_cpu_time_ends_a_solve() -> None:
    hard = pulp.LpProblem("partition", pulp.LpMinimize)
    sizes = [(k * 7919) % 10_007 + 10_000 for k in range(60)]
    top = pulp.LpVariable("top", 0)
    hard += top
    x = [[pulp.LpVariable(f"x{i}_{j}", cat=pulp.LpBinary) for j in range(7)] for i in range(60)]
    for row in x:
        hard += pulp.lpSum(row) == 1
    for j in range(7):
        hard += pulp.lpSum(size * row[j] for size, row in zip(sizes, x, strict=True)) <= top
    began = time.process_time()
    outcome = milp.minimise(hard, nodes=10**9, guard_s=600.0, gap=0.0, cpu_s=1.0)
    assert time.process_time() - began < 5.0
    assert 0 < outcome.bound <= sum(sizes)
