"""Runs a simulation on all cores and keeps every finished step, so that it can be resumed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path

from flexray.errors import UserError
from flexray.json_lines import JsonLinesWriter, read_json_lines
from flexray.simulation.strategies import Case, StepResult, simulate_step
from flexray.solver.planner import warm

Task = tuple[str, Case]


def run(
    tasks: Sequence[Task], path: Path, progress: Callable[[int], None] | None = None
) -> list[StepResult]:
    """Simulates what is not yet in `path`, and appends each step as it is done.

    Args:
        tasks: strategy and case, each once.
        path: the JSON lines of finished steps; made if it is not there.
        progress: is told how many tasks are done, at the start and after each.

    Returns:
        All results, in the order of `tasks`.

    Raises:
        PlanningError: a batch that cannot be planned.
        UserError: `path` holds something else, or a planning process died.
    """
    done = _finished(path)
    todo = [task for task in tasks if _key(task) not in done]
    tell = progress or (lambda count: None)
    count = len(tasks) - len(todo)
    tell(count)
    with JsonLinesWriter(path) as lines:
        for result in _simulate(todo):
            lines.append(result.to_dict())
            done[result.key] = result
            count += 1
            tell(count)
    return [done[_key(task)] for task in tasks]


def _key(task: Task) -> tuple[int, str, int]:
    strategy, case = task
    return case.cluster.gpus, strategy, case.batch


def _finished(path: Path) -> dict[tuple[int, str, int], StepResult]:
    if not path.exists():
        return {}
    try:
        results = [StepResult(**line) for line in read_json_lines(path)]
    except TypeError:
        raise UserError(f"{path}: not the steps of a simulation: pass --overwrite") from None
    return {result.key: result for result in results}


def _simulate(tasks: Sequence[Task]) -> Iterator[StepResult]:
    """Results as they come. Leaving early ends the processes at once."""
    if not tasks:
        return
    workers = min(len(os.sched_getaffinity(0)), len(tasks))
    # Spawned: a fork would copy the locks of whatever threads this process has.
    context = multiprocessing.get_context("spawn")
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(workers, context, _start) as pool:
        try:
            # Ctrl-C goes to the whole foreground group; only this process answers it.
            with _without_interrupts():
                futures: list[Future[StepResult]] = [
                    pool.submit(simulate_step, *task) for task in tasks
                ]
            for future in as_completed(futures):
                yield future.result()
        except BaseException as error:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
            if isinstance(error, BrokenProcessPool):
                raise UserError(
                    "a planning process died (out of memory?): what is done is kept; run the same "
                    "command again to go on"
                ) from None
            raise


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Processes that start meanwhile never see SIGINT; this one sees it afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start() -> None:
    """Prepares a process: it ends with its parent, and its compiled kernels are loaded."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    warm()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
