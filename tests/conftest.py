"""Fixtures that several packages' tests share."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

# Machines are shared: an example's time says nothing.
settings.register_profile("shared", deadline=None)
settings.load_profile("shared")

# Ray's local token file would be wanted by every later `ray start` on the machine.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("WANDB_MODE", "offline")
# Ray runs its workers at nice 15: on a machine that does much else they would not get to start.
os.environ.setdefault("RAY_worker_niceness", "0")


@pytest.fixture(scope="module")
def two_nodes():
    """A Ray cluster of two simulated nodes with two CPUs and one (simulated) GPU each."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )
    for _ in range(2):
        cluster.add_node(num_cpus=2, num_gpus=1)
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="session")
def ray_address():
    """Of a Ray with 8 CPUs, for runs that need none of their own: to start one takes seconds."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 8, "num_gpus": 0, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    yield cluster.address
    cluster.shutdown()


@pytest.fixture(scope="module")
def five_texts(tmp_path_factory):
    """A corpus of five byte-tokenised texts, for `DataSource`."""
    from flexray.datasets.annotate import annotate
    from flexray.datasets.data_source import DataSource

    folder = tmp_path_factory.mktemp("corpus")
    for i, length in enumerate((300, 40, 7, 90, 13)):
        (folder / f"{i}.txt").write_bytes(bytes(32 + (i + j * j) % 90 for j in range(length)))
    annotate([folder], folder / "out", "bytes")
    return DataSource((folder / "out",), 400, "error")
