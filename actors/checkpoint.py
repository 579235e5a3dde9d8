"""The training state of all ranks on disk: trained parameters and optimizer state, sharded.

Written and read by torch.distributed.checkpoint: every rank writes its own rows, and a world of any
size reads them. Frozen parameters are not in it: they are what they were when the run was built.
It knows no Ray. What else a run needs to go on is the driver's (flexray/checkpoints.py).

Usage, on every rank alike:
    checkpointer = Checkpointer(engine.model.model, engine.optimizer)
    written = checkpointer.save("/shared/run/step-20")   # returns once the state is copied
    ...                                                  # training goes on
    written()                                            # waits until all ranks have written
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint._storage_utils import _storage_setup
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException

from flexray.actors.optimizer import make_state
from flexray.actors.rendezvous import new_group

# Of the ranks' agreement on what is where: the slowest rank's files must be written meanwhile.
WRITE_TIMEOUT_S = 2 * 3600.0


class CheckpointFailed(RuntimeError):
    """A checkpoint could not be written or read: one line that says why."""


class Checkpointer:
    """Saves and loads the state of one model and its AdamW; making one is a collective call."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        # Files are written while a step's collectives run: the writers agree in a group of their
        # own, on CPUs, as async_save wants it.
        self._group = new_group(None, WRITE_TIMEOUT_S, backend="gloo")
        self._under_way: Future[None] | None = None

    def save(self, location: str) -> Callable[[], None]:
        """Copies the state to host memory and has it written to a new folder or fsspec URL.

        A collective call. Waits first for what is still being written. Returns a function that
        waits until every rank has written its part; it raises CheckpointFailed, on all of them, if
        one could not.
        """
        self.finish()
        writing = _future(
            dcp.async_save(self._state(), checkpoint_id=location, process_group=self._group)
        )
        written: Future[None] = Future()
        self._under_way = written
        writing.add_done_callback(lambda writing: _tell(writing, written))
        return written.result

    def finish(self) -> None:
        """Waits for what is still being written here, however that ends."""
        if self._under_way is not None:
            self._under_way.exception()

    def leave(self) -> None:
        """Gives up what is still being written: its thread ends with its file, or before.

        What the ranks agree on after that fails on all of them, since the world is gone.
        """
        if self._under_way is not None:
            _set(self._under_way, CheckpointFailed("the ranks changed while it was written"))

    def load(self, location: str) -> None:
        """Takes over what a world of any size has saved. A collective call.

        Raises CheckpointFailed when it cannot be read or belongs to another model.
        """
        saved = list(SavedTensors(location))
        try:
            self._make_optimizer_state(set(saved))
            state = self._state()
            # dcp.load refuses what is missing or differs in shape, and ignores what is left over.
            for key in saved:
                if key not in state:
                    raise CheckpointFailed(
                        f"{location}: cannot load: it has {key} and this model does not: the "
                        "checkpoint belongs to another model"
                    )
            dcp.load(state, checkpoint_id=location, process_group=self._group)
        except CheckpointFailed:
            raise
        except (Exception, CheckpointException) as error:
            raise CheckpointFailed(f"{location}: cannot load: {_reason(error)}") from None

    def _state(self) -> dict[str, torch.Tensor]:
        """The tensors that are saved, by key; what is loaded is written into them."""
        state = {f"model.{name}": tensor for name, tensor in _saved_tensors(self._model)}
        for name, parameter in self._trained():
            for kind, value in self._optimizer.state.get(parameter, {}).items():
                state[f"optimizer.{name}.{kind}"] = value
        return state

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((n, p) for n, p in self._model.named_parameters() if p.requires_grad)

    def _make_optimizer_state(self, keys: set[str]) -> None:
        """AdamW's state for the parameters that had one, as its first step would make it."""
        self._optimizer.state.clear()
        for name, parameter in self._trained():
            if f"optimizer.{name}.exp_avg" in keys:
                make_state(self._optimizer, parameter)


def _saved_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Trained parameters, tied ones once, and the buffers that belong to the weights."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield name, parameter.detach()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


class SavedTensors:
    """The tensors of a checkpoint, read whole, one at a time, by one process."""

    def __init__(self, location: str) -> None:
        """Raises CheckpointFailed when there is no checkpoint."""
        self._reader = _storage_setup(None, location, reader=True)
        try:
            metadata = self._reader.read_metadata()
        except Exception as error:
            raise CheckpointFailed(f"{location}: no checkpoint: {_reason(error)}") from None
        # It is read again for every load otherwise; for many ranks and parameters it is large.
        self._reader.read_metadata = lambda *_, **__: metadata
        self._location, self._entries = location, metadata.state_dict_metadata

    def __iter__(self) -> Iterator[str]:
        """The keys: `model.NAME`, `optimizer.NAME.exp_avg` and so on."""
        return iter(self._entries)

    def read(self, key: str) -> torch.Tensor:
        """A whole tensor. Raises CheckpointFailed."""
        entry = self._entries[key]
        state = {key: torch.empty(entry.size, dtype=entry.properties.dtype)}
        try:
            with warnings.catch_warnings(action="ignore"):  # that there is but one process
                dcp.load(state, storage_reader=self._reader, no_dist=True)
        except (Exception, CheckpointException) as error:
            raise CheckpointFailed(f"{self._location}: {key}: {_reason(error)}") from None
        return state[key]


def _future(saving: Any) -> Future[Any]:
    """The future of the whole save (torch returns two where staging goes on in a thread)."""
    return getattr(saving, "upload_completion", saving)


def _tell(writing: Future[Any], written: Future[None]) -> None:
    """Has `written` end as `writing` has.

    The frames of a write that failed hold its group: other ranks wait until its sockets close.
    """
    error = writing.exception()
    _set(written, None if error is None else CheckpointFailed(_reason(error)))
    while error is not None:
        error.__traceback__, error = None, error.__cause__ or error.__context__


def _set(written: Future[None], failure: CheckpointFailed | None) -> None:
    """How it ended, unless that is known."""
    with suppress(InvalidStateError):
        if failure is None:
            written.set_result(None)
        else:
            written.set_exception(failure)


def _reason(error: BaseException) -> str:
    """The first rank's error in one line."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    return " ".join(f"{type(error).__name__}: {error}".split())
