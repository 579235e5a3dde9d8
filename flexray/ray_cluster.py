"""The Ray cluster of a run: an existing one, or a local one of its own that ends with it."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import ray
import torch

from flexray.config import ClusterSection
from flexray.errors import UserError
from flexray.planning_tasks import PLANNERS

CPU_RANKS = 4


@dataclass(frozen=True)
class Resources:
    """What the run takes."""

    device: str  # "cpu" or "cuda"
    target: int  # ranks that it wants, on CPUs too
    at_start: int | None  # of them, that must be there to begin; None: all


@contextmanager
def connected(section: ClusterSection) -> Iterator[Resources]:
    """Connects to Ray for the length of a run.

    Without an address (and without RAY_ADDRESS) a local Ray starts here and ends with the block.
    Raises UserError when the address does not answer or the cluster has no such device.
    """
    # Otherwise Ray prints a tip about a later default for every task without a GPU.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # And a traceback for every call that failed with a rank: the run says in a line what it does.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    address = section.address or os.environ.get("RAY_ADDRESS")
    on_sigterm = signal.getsignal(signal.SIGTERM)
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if address:
            ray.init(address=address, **quiet)
        else:
            gpus = torch.cuda.device_count()
            ranks = ranks_of(section, CPU_RANKS if section.device == "cpu" or not gpus else gpus)
            # Ranks may share cores. Ray keeps as many idle processes as it has CPUs: room for the
            # planner's, which would else start anew, and load their kernels, for most plans.
            most = max(ranks, section.max_gpus or 0)
            cpus = max(most + PLANNERS, os.cpu_count() or 1)
            ray.init(address="local", num_cpus=cpus, include_dashboard=False, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = f"no Ray cluster answers at {address}" if address else "Ray did not start here"
        raise UserError(f"{where}: {' '.join(str(error).split())}") from None
    # Ray puts its own in place, which ends the process without a clean-up.
    signal.signal(signal.SIGTERM, on_sigterm)
    try:
        yield _resources(section)
    finally:
        ray.shutdown()


def _resources(section: ClusterSection) -> Resources:
    gpus = int(ray.cluster_resources().get("GPU", 0))
    if section.device == "cuda" and not gpus:
        raise UserError("cluster.device=cuda, but the Ray cluster has no GPU: use cpu or auto")
    if section.device == "cpu" or not gpus:
        return Resources("cpu", ranks_of(section, CPU_RANKS), section.min_gpus)
    target = section.gpus or section.max_gpus or ranks_of(section, gpus)
    return Resources("cuda", target, section.min_gpus)


def ranks_of(section: ClusterSection, default: int) -> int:
    """cluster.gpus, or the default within the limits."""
    most = min(section.max_gpus or default, default)
    return section.gpus or max(section.min_gpus or 1, most)
