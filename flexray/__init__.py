"""FlexRay: elastic LLM training on Ray, with a new sequence-parallel plan for every step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flexray.callbacks import Callback
    from flexray.trainer import Trainer

__version__ = "0.1.0"
__all__ = ["Callback", "Trainer", "__version__"]


def __getattr__(name: str) -> Any:
    """`Trainer` and `Callback` load torch and Ray, which `flexray --help` does not need."""
    if name == "Trainer":
        from flexray.trainer import Trainer

        return Trainer
    if name == "Callback":
        from flexray.callbacks import Callback

        return Callback
    raise AttributeError(f"module 'flexray' has no attribute {name!r}")
