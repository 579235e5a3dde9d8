"""The GPU check, on a CPU at tiny shapes: it runs, and it sees what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from flexray.actors.attention import backends
from flexray.jobs import gpu_check
from flexray.jobs.attention_numerics import check_attention
from flexray.jobs.plain_step import padded_batches
from flexray.jobs.step_speed import FirstStep, batch_of, flops, one_billion, tiny

CPU = torch.device("cpu")


def test_it_runs_without_ray_and_writes_its_figures(tmp_path):
    figures = tmp_path / "figures.json"
    arguments = ["--device", "cpu", "--quick", "--json", str(figures)]
    program = (
        "import sys; from flexray.jobs.gpu_check import main; code = main(sys.argv[1:]);"
        "heavy = {'ray', 'typer', 'rich', 'pydantic', 'wandb', 'pulp'} & set(sys.modules);"
        "sys.exit(code or (heavy and f'imported {heavy}') or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All right" in done.stdout
    found = json.loads(figures.read_text())
    assert found["ok"]
    assert {check["backend"] for check in found["attention"]} == {"sdpa"}
    assert found["first_step"]["loss"] == pytest.approx(found["first_step"]["plain_loss"], rel=1e-5)
    assert [s["name"] for s in found["speed"]] == [
        "FlexRay, packed",
        "plain, padded",
        "plain, one by one",
    ]
    for speed in found["speed"]:
        assert speed["tokens_per_s"] == pytest.approx(found["tokens"] / speed["step_ms"] * 1e3)
        assert speed["mfu"] is None  # a CPU has no peak here


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_exits_2(capsys):
    assert gpu_check.main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "no CUDA GPU" in err
    assert "--device cpu" in err


def test_it_names_what_is_not_installed(monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "NEEDS", ("torch", "no_such_library"))
    assert gpu_check.main([]) == 2
    assert "not installed: no_such_library" in capsys.readouterr().err


def across_borders(q, k, v, borders, scale):
    """Right but for one thing: the pack is one sequence."""
    return backends.sdpa(q, k, v, backends.Borders([borders.tokens]), scale)


def not_causal(q, k, v, borders, scale):
    return torch.cat(
        [
            F.scaled_dot_product_attention(
                *(x[a:b].transpose(0, 1)[None] for x in (q, k, v)), scale=scale, enable_gqa=True
            )[0].transpose(0, 1)
            for a, b in borders.spans
        ]
    )


def gone(*_):
    raise RuntimeError("no kernel image\nmore")


@pytest.mark.parametrize("kernel", [across_borders, not_causal, gone])
def test_a_wrong_kernel_is_seen(monkeypatch, kernel):
    monkeypatch.setitem(backends.KERNELS, "sdpa", kernel)
    checks = list(check_attention(CPU, 64))
    assert checks
    assert not any(check.ok for check in checks)
    if kernel is gone:
        assert checks[0].failure == "RuntimeError: no kernel image"


def test_other_losses_than_the_plain_ones_are_seen():
    assert FirstStep(6.0, 6.00001, 1.0, 1.00001).ok
    assert not FirstStep(6.0, 6.001, 1.0, 1.0).ok
    assert not FirstStep(6.0, 6.0, 1.0, 1.01).ok


def test_the_batch_is_long_tailed_and_padded_little():
    batch = batch_of(32_768, 8_192, 1000)
    lengths = [len(tokens) for tokens, _ in batch]
    assert sum(lengths) == 32_768
    assert max(lengths) == 8_192
    assert np.median(lengths) < 1_000
    parts = padded_batches(batch)
    assert sorted(len(t) for part in parts for t, _ in part) == sorted(lengths)
    assert all(len(part) * len(part[0][0]) <= 8_192 for part in parts)


def test_flops_are_those_of_the_products_that_are_made():
    config = tiny()
    # Per layer q, o: E x E; k, v: E x E/4; three E x 256; the head: E x 512; E is 128.
    products = 2 * (2 * 128 * 128 + 2 * 128 * 32 + 3 * 128 * 256) + 128 * 512
    assert flops(config, [10]) == 6 * products * 10 + 6 * 2 * 128 * 100
    assert flops(config, [10, 10]) == 2 * flops(config, [10])
    # Llama 3.2 1B: 1.24 billion parameters, all but the norms in products (the table is the head).
    assert flops(one_billion(), [1]) == pytest.approx(6 * 1.2357e9, rel=1e-3)
