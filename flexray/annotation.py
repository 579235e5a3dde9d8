"""Has the pieces of a corpus written by Ray tasks, where there is enough to share out."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from flexray.datasets.annotate import run_here
from flexray.datasets.errors import CorpusError
from flexray.datasets.piece_writer import Advance, Job, write_piece
from flexray.datasets.pieces import Piece
from flexray.datasets.writer import Written
from flexray.errors import UserError
from flexray.ray_address import check_answers

if TYPE_CHECKING:
    import ray

# Bytes of input from which on Ray's start is worth its time.
RAY_BYTES = 1 << 27


def run_pieces(
    job: Job, pieces: Sequence[Piece], advance: Advance, *, workers: int | None = None
) -> dict[int, Written]:
    """A `flexray.datasets.annotate.Runner`: Ray tasks, or this process where that is as good.

    Tokens never pass through this process: each task writes its own files into the job's folder,
    which must be on storage that all nodes of the cluster share, and gives back counts.

    Args:
        job: as tasks get it.
        pieces: to write, in the order in which errors are reported.
        advance: called with the counts of each piece that is finished.
        workers: tasks at once, at most; 1: none, in this process. By default as many as there are
            CPUs, or this process for an input of less than `RAY_BYTES`.

    Raises:
        CorpusError: the input cannot be used; of several pieces' errors the first piece's.
        UserError: Ray cannot be reached, or loses tasks.
    """
    small = workers is None and sum(piece.size for piece in pieces) < RAY_BYTES
    if small or workers == 1 or len(pieces) < 2:
        return run_here(job, pieces, advance)
    with _cluster(workers) as limit:
        return _run_tasks(job, pieces, advance, limit)


def _run_tasks(
    job: Job, pieces: Sequence[Piece], advance: Advance, limit: int
) -> dict[int, Written]:
    import ray

    task = ray.remote(num_cpus=1, scheduling_strategy="SPREAD")(_write)
    shared = [ray.put(job)]  # in a list it stays a reference, which a process resolves once
    written: dict[int, Written] = {}
    waiting = list(reversed(pieces))
    running: dict[ray.ObjectRef, Piece] = {}
    errors: dict[int, Exception] = {}
    try:
        while waiting or running:
            while waiting and len(running) < limit:
                piece = waiting.pop()
                running[task.remote(shared, str(Path.cwd()), piece)] = piece
            (done,), _ = ray.wait(list(running), num_returns=1)
            piece = running.pop(done)
            try:
                result = written[piece.index] = ray.get(done)
                advance(piece.size, result.rows, result.tokens)
            except ray.exceptions.RayError as error:
                errors[piece.index] = _plain(error)
                # Pieces before it may have an error too, which is the one to tell.
                waiting.clear()
                _stop([ref for ref, other in running.items() if other.index > piece.index])
                running = {ref: p for ref, p in running.items() if p.index < piece.index}
    finally:
        _stop(list(running))
    if errors:
        raise errors[min(errors)]
    return written


def _stop(running: list[ray.ObjectRef]) -> None:
    """Ends tasks, so that none writes into a folder that is about to be removed."""
    import ray

    for task in running:
        ray.cancel(task, force=True)
    if running:
        ray.wait(running, num_returns=len(running), timeout=10)


def _write(shared: list[ray.ObjectRef], folder: str, piece: Piece) -> Written:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the tasks share out the cores already
    with suppress(FileNotFoundError):
        os.chdir(folder)  # inputs may be relative
    job = _job(shared[0])
    if not job.folder.is_dir():
        raise CorpusError(
            f"{job.folder.parent}: cannot be reached from every node of the Ray cluster: choose an "
            "output folder on storage that they share, or --workers 1"
        )
    return write_piece(job, piece, lambda *_: None)


@lru_cache(maxsize=1)
def _job(reference: ray.ObjectRef) -> Job:
    """The job, once a process: a large vocabulary takes a second to load."""
    import ray

    job: Job = ray.get(reference)
    return job


def _plain(error: Exception) -> Exception:
    """What a task raised, or why there is no telling."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, Exception):
        return cause
    reason = str(error).strip().split("\n")[0]
    return UserError(
        f"Ray lost a task that was annotating ({reason}): run the same command again, which goes "
        "on with what is finished; --workers N asks for fewer at once, which takes less memory"
    )


@contextmanager
def _cluster(workers: int | None) -> Iterator[int]:
    """Connects to RAY_ADDRESS, or starts a Ray here, and says how many tasks may run at once."""
    import ray

    if ray.is_initialized():  # the caller's own, which is left as it is
        yield _limit(workers)
        return
    address = os.environ.get("RAY_ADDRESS")
    if address:
        check_answers(address)
    cpus = len(os.sched_getaffinity(0))
    local = {} if address else {"num_cpus": max(workers or 0, cpus), "include_dashboard": False}
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            address=address or "local", log_to_driver=False, logging_level=logging.ERROR, **local
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = f"no Ray cluster answers at {address}" if address else "Ray did not start here"
        raise UserError(f"{where} ({' '.join(str(error).split())})") from None
    signal.signal(signal.SIGTERM, on_sigterm)  # Ray's own would end without a clean-up
    try:
        yield _limit(workers)
    finally:
        ray.shutdown()


def _limit(workers: int | None) -> int:
    import ray

    cpus = max(1, int(ray.cluster_resources().get("CPU", 1)))
    return min(workers or cpus, cpus)
