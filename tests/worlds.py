"""Runs a function in a world of real processes that share a store."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# A server that has imported the slow libraries once and forks a fresh process per rank. (Forking
# from the test process itself would copy Ray's and the store's threads.)
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["flexray.actors.engine", "transformers.models.llama.modeling_llama"]
)


def run_world(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    dying: Collection[int] = (),
    timeout_s: float = 120,
) -> list:
    """`function(rank, world, store, *args)` in `world` processes; results in rank order.

    `function` must be importable. Ranks in `dying` must be killed; their result is None. Raises
    AssertionError with the traceback of a rank that failed.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, processes = [], []
    for rank in range(world):
        receiver, sender = _context.Pipe(duplex=False)
        process = _context.Process(
            target=_rank, args=(sender, function, rank, world, store.port, args), daemon=True
        )
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    try:
        results = []
        for rank, pipe in enumerate(pipes):
            assert pipe.poll(timeout_s), f"rank {rank} of {world} gave no result in {timeout_s} s"
            try:
                ok, result = pipe.recv()
            except EOFError:
                assert rank in dying, f"rank {rank} of {world} died"
                results.append(None)
                continue
            assert rank not in dying, f"rank {rank} of {world} was to die"
            assert ok, f"rank {rank} of {world}:\n{result}"
            results.append(result)
        return results
    finally:
        for process in processes:
            process.join(timeout=5)
            process.kill()


def _rank(sender: Any, function: Any, rank: int, world: int, port: int, args: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    try:
        sender.send((True, function(rank, world, store, *args)))
        code = 0
    except BaseException:
        sender.send((False, traceback.format_exc()))
        code = 1
    # Process groups that a failed test left behind would wait for their peers.
    os._exit(code)
