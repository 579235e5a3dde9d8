"""Checks and times the engine on one GPU, without Ray.

    python -m flexray.jobs.gpu_check [--quick] [--json FILE]

Needs torch, transformers, numpy and safetensors. In this order: the numerics of every attention
backend that this machine has, in bfloat16 against SDPA in float32; loss and gradient norm of the
first step in float32 against the same step written plainly; tokens per second and model FLOP
utilisation of a packed step of a 1B Llama in bfloat16 against plain ones, in the same process.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

NEEDS = ("torch", "transformers", "numpy", "safetensors")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs all checks. Exit code 0: all are right; 1: one is not; 2: cannot run here."""
    parser = argparse.ArgumentParser(prog="python -m flexray.jobs.gpu_check", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="fewer tokens and repetitions")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny shapes"
    )
    parser.add_argument(
        "--peak-tflops", type=float, help="dense bfloat16 peak of a GPU that is not in the table"
    )
    options = parser.parse_args(arguments)
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        print(f"gpu_check: not installed: {', '.join(missing)}; pip install them", file=sys.stderr)
        return 2
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "gpu_check: torch sees no CUDA GPU here; use a machine with one, or --device cpu for a "
            "run at tiny shapes",
            file=sys.stderr,
        )
        return 2
    return _run(options)


def _run(options: argparse.Namespace) -> int:
    import torch
    import transformers

    from flexray.actors.attention.backends import available_backends
    from flexray.jobs.attention_numerics import TOLERANCE, check_attention
    from flexray.jobs.step_speed import (
        batch_of,
        compare_speed,
        first_step,
        one_billion,
        peak_tflops,
        tiny,
    )

    cuda = options.device == "cuda"
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    if not cuda:
        torch.set_num_threads(1)  # more are slower at shapes this small
    name = torch.cuda.get_device_name(device) if cuda else "CPU"
    print(f"{name}, torch {torch.__version__}, transformers {transformers.__version__}")
    for backend in available_backends():
        print(f"  {backend.name}: {'yes' if backend.usable else 'no'}, {backend.why}")

    print(f"\nAttention in bfloat16 against SDPA in float32 (relative errors, at most {TOLERANCE})")
    longest = 4096 if cuda and not options.quick else 512
    attention = list(check_attention(device, longest))
    _table(
        ("backend", "pack", "output", "dq", "dk", "dv", ""),
        (
            (
                c.backend,
                c.pack,
                *(f"{c.errors[x]:.1e}" if c.errors else "-" for x in ("output", "dq", "dk", "dv")),
                "ok" if c.ok else c.failure or "WRONG",
            )
            for c in attention
        ),
    )

    print("\nFirst step in float32")
    first = first_step(device)
    _table(
        ("", "FlexRay", "plain", ""),
        (
            ("loss", f"{first.loss:.7f}", f"{first.plain_loss:.7f}", "ok" if first.ok else "WRONG"),
            ("gradient norm", f"{first.norm:.7f}", f"{first.plain_norm:.7f}", ""),
        ),
    )

    config = one_billion() if cuda else tiny()
    tokens, longest = (32_768, 8_192) if cuda else (1_024, 256)
    if options.quick:
        tokens, longest = tokens // 4, longest // 4
    batch = batch_of(tokens, longest, config.vocab_size)
    peak = options.peak_tflops or peak_tflops(device)
    print(
        f"\nA step of {tokens} tokens in {len(batch)} sequences (longest {longest}), bfloat16, "
        + "peak "
        + (f"{peak:g} TFLOP/s" if peak else "not known")
    )
    repeats = 3 if options.quick else 10
    speeds = list(compare_speed(config, batch, device, repeats=repeats, peak=peak))
    _table(
        ("step", "ms", "tokens/s", "TFLOP/s", "MFU", "GiB", ""),
        (
            (
                s.name,
                "-" if s.step_ms is None else f"{s.step_ms:.1f}",
                f"{s.tokens_per_s:.0f}",
                f"{s.tflops:.1f}",
                "-" if s.mfu is None else f"{s.mfu:.1%}",
                "-" if s.peak_memory_mb is None else f"{s.peak_memory_mb / 1024:.1f}",
                s.note,
            )
            for s in speeds
        ),
    )
    print(
        "FLOP of a step: 6 x parameters of matrix products x tokens + 6 x layers x heads x head "
        "size x sum of squared lengths; padding and recomputation not counted"
    )

    right = all(c.ok for c in attention) and first.ok and speeds[0].step_ms is not None
    if options.json:
        figures = {
            "device": name,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "ok": right,
            "attention": [asdict(c) | {"ok": c.ok} for c in attention],
            "first_step": asdict(first) | {"ok": first.ok},
            "speed": [asdict(s) for s in speeds],
            "peak_tflops": peak,
            "tokens": tokens,
            "lengths": [len(t) for t, _ in batch],
        }
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    print("\nAll right" if right else "\nSomething is WRONG: see above")
    return 0 if right else 1


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    lines = [head, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    for line in lines:
        cells = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line[:-1], widths[:-1], strict=True))
        ]
        print("  " + "  ".join([*cells, line[-1]]).rstrip())


if __name__ == "__main__":
    sys.exit(main())
