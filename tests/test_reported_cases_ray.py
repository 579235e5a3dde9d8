"""Failures that people reported about Ray, as inputs with the right outcome."""

from __future__ import annotations

import os
import re

import pytest
import ray

from flexray.actors.crew import ImpossibleRequest, check_resources
from flexray.actors.membership import Membership
from flexray.actors.pool import Pool
from flexray.actors.seat import Initial
from flexray.actors.settings import EngineSettings
from flexray.actors.worker import local_device
from tests.actors.models import config


def test_an_impossible_request_pends_for_ever(two_nodes):
    """ray#27287, #29940: more GPUs than there are is an error at once, with have and need."""
    with pytest.raises(ImpossibleRequest, match="needs 8 GPUs and the cluster has 2"):
        check_resources(8, "cuda")
    check_resources(2, "cuda")
    with pytest.raises(ImpossibleRequest, match="needs 5 CPUs and the cluster has 4"):
        check_resources(5, "cpu")


def test_duplicate_gpu_detected(two_nodes):
    """OpenRLHF#524, verl#161: under Ray's isolation the local device is 0 on every actor."""

    @ray.remote(num_gpus=1, num_cpus=0)
    class Probe:
        def look(self):
            return os.environ["CUDA_VISIBLE_DEVICES"], str(local_device("cuda"))

    probes = [Probe.remote() for _ in range(2)]
    for visible, device in ray.get([probe.look.remote() for probe in probes]):
        assert re.fullmatch(r"\d+", visible)  # one GPU, however it is numbered
        assert device == "cuda:0"


def test_address_already_in_use(two_nodes, five_texts):
    """ray#35907: no fixed ports, so that two runs on one machine do not disturb each other."""
    settings = EngineSettings(model=config(vocab_size=256), timeout_s=60)
    pools = [Pool(Membership(2, 2), "cpu", settings, five_texts) for _ in range(2)]
    with pools[0] as one, pools[1] as two:
        for pool in (one, two):
            pool.start()
            assert pool.form(1, Initial()).world == 2
