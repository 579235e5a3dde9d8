"""What both systems train in the benchmark of recovery, and how they are watched."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from flexray.errors import RunFailed

RANKS, FEWEST = 4, 3

# 49.7M parameters, tokens are bytes.
MODEL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 640,
    "intermediate_size": 1728,
    "num_hidden_layers": 10,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
PARAMETERS = 49_738_880

# A step's batch: as many sequences for each of four ranks as for each of three.
SEQUENCES, LENGTH = 12, 16
LEARNING_RATE = 1e-4


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Looks every 20 ms. Raises RunFailed, saying `what` did not come."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise RunFailed(f"{what} did not come in {timeout_s:g} s")
        time.sleep(0.02)
