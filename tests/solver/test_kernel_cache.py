"""Kernels compile once per user, whatever folder the package lies in and whatever is planned."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import flexray
from flexray.solver import kernels
from flexray.solver.cluster import Cluster
from flexray.solver.cost import CostModel
from flexray.solver.planner import Effort, plan_step, warm

COST = CostModel(1e-3, 0.1, micro_step_ms=1, bandwidth=((2, 5.0),), tokens_per_gpu=100)


def test_one_compilation_serves_every_cluster_and_batch() -> None:
    warm()
    for cluster in (Cluster((4,)), Cluster((3, 2)), Cluster((2,), (1.0, 0.5))):
        for lengths in ([5], [150, 3, 3, 90], list(range(1, 100))):
            plan_step(lengths, COST, cluster, effort=Effort(evaluations=1000))
    for name in ("place", "layout", "best_fit", "anneal", "polish"):
        # None where a cached caller brought it along.
        assert len(getattr(kernels, name).signatures) <= 1, name
    assert len(kernels.anneal.signatures) == 1


def test_a_copy_of_the_package_finds_the_compiled_kernels(tmp_path: Path) -> None:
    """As Ray unpacks it for every session: other folder, other time stamps."""
    code = (
        "import numpy as np; from flexray.solver import kernels;"
        "kernels.best_fit(np.array([2, 1]), 3, np.zeros(2, np.int64)); s = kernels.best_fit.stats;"
        "print(kernels.__file__, len(s.cache_hits), len(s.cache_misses))"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment.pop("NUMBA_CACHE_DIR", None)
    hits = []
    for copy in ("one", "two"):
        package = tmp_path / copy / "flexray"
        package.mkdir(parents=True)
        shutil.copy(Path(flexray.__file__), package)
        shutil.copytree(
            Path(kernels.__file__).parent,
            package / "solver",
            ignore=shutil.ignore_patterns("__pycache__"),
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**environment, "PYTHONPATH": str(tmp_path / copy)},
            capture_output=True,
            text=True,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        path, *counts = done.stdout.split()
        assert path.startswith(str(package))
        hits.append(tuple(map(int, counts)))
    assert hits == [(0, 1), (1, 0)]
