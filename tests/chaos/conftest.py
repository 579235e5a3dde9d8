"""A Ray cluster of simulated nodes that may be taken away."""

from __future__ import annotations

import os
import time
from contextlib import suppress

import pytest

# Read by Ray's own processes when the head starts: a node that is killed is missed in about 2 s.
FAST = {
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "500",
    "RAY_health_check_failure_threshold": "3",
}


PREEMPTION = 2  # DrainNodeReason


class Nodes:
    """Three nodes of two CPUs; one that is taken away is followed by another, by `refill`."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.nodes = {}
        self.refill()

    def refill(self):
        """As many as at first. In the main thread: Ray sets signal handlers."""
        while len(self.nodes) < 3:
            node = self.cluster.add_node(num_cpus=2)
            self.nodes[node.node_id] = node

    def kill(self, node_id):
        """SIGKILLs the raylet of a node."""
        if node := self.nodes.pop(node_id, None):
            self.cluster.remove_node(node, allow_graceful=False)

    def drain(self, node_id):
        """Tells Ray that a node will be gone in a minute."""
        import ray
        from ray._raylet import GcsClient

        if self.nodes.pop(node_id, None) is None:
            return
        with suppress(ray.exceptions.RayError):
            GcsClient(address=self.cluster.address).drain_node(
                node_id, PREEMPTION, "spot notice of a test", int(1000 * (time.time() + 60))
            )


@pytest.fixture(scope="module")
def nodes():
    """The cluster, with the driver's own node that no rank runs on."""
    from ray.cluster_utils import Cluster

    before = {name: os.environ.get(name) for name in FAST}
    os.environ.update(FAST)
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )
    yield Nodes(cluster)
    cluster.shutdown()
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
