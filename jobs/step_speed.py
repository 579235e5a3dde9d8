"""One training step of the engine against the same step written plainly with transformers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from transformers import LlamaConfig, PretrainedConfig

from flexray.actors.engine import Engine
from flexray.actors.model import build_on_meta
from flexray.actors.pack import Tokens
from flexray.actors.settings import EngineSettings
from flexray.actors.work import RankMicroStep, RankStep
from flexray.jobs.plain_step import padded_batches, plain_model, plain_optimizer, plain_step

# Dense bfloat16 TFLOP/s with float32 accumulation, from the makers' data sheets.
PEAKS = {"H200": 989, "H100 PCIe": 756, "H100": 989, "A100": 312, "L40S": 362, "B200": 2250}


@dataclass(frozen=True)
class Speed:
    """How fast one way to make a step is. `mfu` is None where the peak is not known."""

    name: str
    step_ms: float | None  # median; None if it does not fit the GPU
    tokens_per_s: float  # tokens of sequences, padding not counted
    tflops: float
    mfu: float | None
    peak_memory_mb: float | None
    note: str


@dataclass(frozen=True)
class FirstStep:
    """Loss and gradient norm of the first step, in float32, of the engine and written plainly."""

    loss: float
    plain_loss: float
    norm: float
    plain_norm: float

    @property
    def ok(self) -> bool:
        """Equal to what float32 can tell."""
        return math.isclose(self.loss, self.plain_loss, rel_tol=1e-5) and math.isclose(
            self.norm, self.plain_norm, rel_tol=1e-4
        )


def one_billion() -> LlamaConfig:
    """The shape of Llama 3.2 1B."""
    return LlamaConfig(
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131_072,
        tie_word_embeddings=True,
    )


def tiny() -> LlamaConfig:
    """A shape for the float32 comparison and for machines without a GPU."""
    return LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
    )


def batch_of(tokens: int, longest: int, vocabulary: int, seed: int = 0) -> list[Tokens]:
    """Random sequences with long-tailed lengths, `tokens` in all, one of them the longest."""
    random = np.random.default_rng(seed)
    lengths = [longest]
    while sum(lengths) < tokens:
        drawn = int(np.clip(random.lognormal(math.log(longest) - 3, 1.0), 2, longest))
        lengths.append(min(drawn, tokens - sum(lengths)))
    return [(random.integers(0, vocabulary, n), None) for n in lengths]


def flops(config: PretrainedConfig, lengths: Sequence[int]) -> float:
    """Floating-point operations of the model in one step, recomputation not counted.

    6 a parameter of a matrix product and token (forward 2, backward 4), and 6 * layers * heads *
    head size * S^2 a sequence: causal attention, half of the two S x S products.
    """
    model = build_on_meta(config, torch.bfloat16)
    products = sum(
        module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear)
    )
    width = config.num_hidden_layers * config.num_attention_heads * config.head_dim
    return 6.0 * products * sum(lengths) + 6.0 * width * sum(n * n for n in lengths)


def peak_tflops(device: torch.device) -> float | None:
    """The data sheet's dense bfloat16 rate of this GPU, None for an unknown one or a CPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in PEAKS.items() if known in name), None)


def first_step(device: torch.device) -> FirstStep:
    """Both ways from the same weights, in float32, at a small shape."""
    config = tiny()
    batch = batch_of(600, 200, config.vocab_size)
    settings = EngineSettings(model=config, dtype="float32")
    with _engine(settings, batch, device) as engine:
        report = engine.run_step(_whole_batch(batch))
    model = plain_model(settings, device)
    loss, norm = plain_step(model, plain_optimizer(model), [[row] for row in batch], settings)
    return FirstStep(report.loss, loss, report.gradient_norm, norm)


def compare_speed(
    config: PretrainedConfig,
    batch: Sequence[Tokens],
    device: torch.device,
    *,
    repeats: int,
    peak: float | None,
) -> Iterator[Speed]:
    """Times the engine's packed step, the padded one and the one sequence by sequence, in bfloat16.

    All have float32 master weights, AdamW and clipping. When one does not fit the GPU, all are made
    again with activation checkpointing.
    """
    settings = EngineSettings(model=config, dtype="bfloat16")
    ways: dict[str, Callable[[EngineSettings], tuple[list[float], str]]] = {
        "FlexRay, packed": lambda s: _time_engine(s, batch, device, repeats),
        "plain, padded": lambda s: _time_plain(s, padded_batches(batch), device, repeats),
        "plain, one by one": lambda s: _time_plain(s, [[row] for row in batch], device, repeats),
    }
    lengths = [len(tokens) for tokens, _ in batch]
    work = flops(config, lengths)
    for checkpointing in (False, True):
        found = []
        for name, way in ways.items():
            if device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(device)
            try:
                times, note = way(replace(settings, activation_checkpointing=checkpointing))
            except torch.OutOfMemoryError:
                found.append(Speed(name, None, 0.0, 0.0, None, None, "out of memory"))
                continue
            ms = sorted(times)[len(times) // 2]
            tflops = work / ms / 1e9
            memory = None
            if device.type == "cuda":
                memory = torch.cuda.max_memory_allocated(device) / 2**20
            if checkpointing:
                note += ", activation checkpointing"
            found.append(
                Speed(
                    name,
                    ms,
                    sum(lengths) / ms * 1e3,
                    tflops,
                    tflops / peak if peak else None,
                    memory,
                    note,
                )
            )
        if all(speed.step_ms is not None for speed in found):
            break
    yield from found


def _time_engine(
    settings: EngineSettings, batch: Sequence[Tokens], device: torch.device, repeats: int
) -> tuple[list[float], str]:
    with _engine(settings, batch, device) as engine:
        work = _whole_batch(batch)
        return _times(lambda: engine.run_step(work), device, repeats), engine.backend


def _time_plain(
    settings: EngineSettings, parts: list[list[Tokens]], device: torch.device, repeats: int
) -> tuple[list[float], str]:
    model = plain_model(settings, device)
    optimizer = plain_optimizer(model)
    padding = sum(len(p) * max(len(t) for t, _ in p) for p in parts) / sum(
        len(tokens) for part in parts for tokens, _ in part
    )
    note = f"sdpa, {len(parts)} batches, {padding:.2f} times the tokens with padding"
    return (
        _times(lambda: plain_step(model, optimizer, parts, settings), device, repeats),
        note,
    )


def _times(step: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Milliseconds of each of `repeats` steps after two that warm up."""
    times = []
    for number in range(2 + repeats):
        if device.type == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            step()
            stop.record()
            torch.cuda.synchronize(device)
            ms = start.elapsed_time(stop)
        else:
            began = time.perf_counter()
            step()
            ms = (time.perf_counter() - began) * 1e3
        if number >= 2:
            times.append(ms)
    return times


@contextmanager
def _engine(
    settings: EngineSettings, batch: Sequence[Tokens], device: torch.device
) -> Iterator[Engine]:
    """An engine that is a world of its own."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    engine = Engine(
        settings, batch.__getitem__, store=store, generation=0, rank=0, world=1, device=device
    )
    try:
        yield engine
    finally:
        engine.leave()


def _whole_batch(batch: Sequence[Tokens]) -> RankStep:
    """One micro-step with everything in one pack."""
    part = RankMicroStep((0,), tuple(range(len(batch))))
    labels = sum(len(tokens) - 1 for tokens, _ in batch)
    return RankStep(1, 0, labels, (part,), ())
