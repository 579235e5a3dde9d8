"""What this machine has, and what a run on it would use. What is missing or broken is a line."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import psutil

from flexray import __version__

Status = Literal["ok", "missing", "broken"]


@dataclass(frozen=True)
class Finding:
    """One line: what was looked for, whether it is there, and the version, number or reason."""

    name: str
    status: Status
    detail: str


@dataclass(frozen=True)
class Attention:
    """One attention backend, in the order in which `auto` tries them."""

    name: str
    usable: bool
    why: str


@dataclass(frozen=True)
class Report:
    """Everything found.

    Attributes:
        findings: what is installed and what the machine has.
        attention: backends in order of preference.
        used: what a run without a config would use, by name.
    """

    findings: tuple[Finding, ...]
    attention: tuple[Attention, ...]
    used: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """The JSON form of `flexray doctor --json`."""
        return asdict(self)


def examine() -> Report:
    """Look at this machine. Connects to nothing, starts nothing, takes the time to import torch."""
    probes: dict[str, Callable[[], str]] = {
        "FlexRay": lambda: __version__,
        "Python": lambda: f"{platform.python_version()} on {platform.platform(terse=True)}",
        "CPU cores": lambda: str(_cores()),
        "memory": lambda: f"{psutil.virtual_memory().total / 2**30:.1f} GiB",
        "torch": _torch,
        "CUDA": _cuda,
        "GPUs": _gpus,
        "NCCL": _nccl,
        "flash-attn": lambda: version("flash_attn"),
        "transformers": lambda: version("transformers"),
        "Ray": lambda: version("ray"),
        "Weights & Biases": lambda: version("wandb"),
    }
    findings = tuple(_probe(name, look) for name, look in probes.items())
    attention = _attention()
    return Report(findings, attention, _used(attention))


class _MissingError(Exception):
    """What was looked for is not here; the text says what there is instead."""


def _probe(name: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding(name, "ok", look())
    except _MissingError as error:
        return Finding(name, "missing", str(error))
    except (PackageNotFoundError, ModuleNotFoundError):
        return Finding(name, "missing", "not installed")
    except Exception as error:  # a library that cannot be loaded fails in any way it likes
        return Finding(name, "broken", " ".join(f"{type(error).__name__}: {error}".split()))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _torch() -> str:
    import torch

    return str(torch.__version__)


def _cuda() -> str:
    import torch

    if torch.version.cuda is None:
        raise _MissingError("this torch is built without it")
    if not torch.cuda.is_available():
        raise _MissingError(f"torch is built for {torch.version.cuda}, but no GPU answers")
    return str(torch.version.cuda)


def _gpus() -> str:
    import torch

    if not torch.cuda.is_available():
        raise _MissingError("none")
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return ", ".join(f"{device.name} {device.total_memory / 2**30:.0f} GiB" for device in devices)


def _nccl() -> str:
    import torch.distributed

    if not torch.distributed.is_nccl_available():
        raise _MissingError("this torch is built without it; CPU ranks use gloo")
    return ".".join(map(str, torch.cuda.nccl.version()))


def _attention() -> tuple[Attention, ...]:
    try:
        from flexray.actors.attention.backends import available_backends

        return tuple(Attention(b.name, b.usable, b.why) for b in available_backends())
    except Exception as error:  # no torch, or a broken one: said by its own line
        return (Attention("none", False, " ".join(f"{type(error).__name__}: {error}".split())),)


def _used(attention: tuple[Attention, ...]) -> dict[str, str]:
    from flexray.tracking import wandb_mode

    try:
        import torch

        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        device = f"cuda, {gpus} ranks over NCCL" if gpus else "cpu, 4 ranks over gloo"
    except Exception:  # as above
        device = "none: torch cannot be loaded"
    names = [backend.name for backend in attention if backend.usable]
    address = os.environ.get("RAY_ADDRESS")
    mode, why = wandb_mode("auto")
    return {
        "device": device,
        "attention": names[0] if names else "none",
        "Ray": f"the cluster at {address} (RAY_ADDRESS)"
        if address
        else "a local one, started anew",
        "Weights & Biases": f"{mode} ({why})",
    }
