"""`flexray profile` as a user runs it, and what the other commands make of its preset."""

from __future__ import annotations

import re
import subprocess
import sys
from datetime import UTC, datetime

import pytest

from flexray import yaml_text
from flexray.presets import load_preset
from tests.flexray.runs import SMALL, environment, events, finish, start

# The real program. How good a fit is depends on what else the machine does: `limit` is how bad it
# may be; few short rounds suffice here.
PROGRAM = """
import sys
from flexray.measurement import fit, measure

fit.WORST = fit.UNSURE = float(sys.argv.pop(1))
measure.ROUNDS, measure.LONG_ENOUGH_MS = 2, 5.0

from flexray.__main__ import main

main()
"""


def profile(*arguments, limit=1e9, ray=None):
    settings = [x for s in SMALL for x in ("--set", s)]
    return run("-c", PROGRAM, str(limit), "profile", *settings, *map(str, arguments), ray=ray)


def run(*arguments, ray=None):
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env=environment(ray),
        timeout=300,
    )


@pytest.fixture(scope="module")
def measured(tmp_path_factory, ray_address):
    """A preset of two CPU ranks, and what was printed."""
    out = tmp_path_factory.mktemp("presets") / "two.yaml"
    # It is the config that will train with the preset, which is not there yet.
    preset = f"planner.preset={out}"
    done = profile("--out", out, "--set", "cluster.gpus=2", "--set", preset, ray=ray_address)
    assert done.returncode == 0, done.stderr
    return out, done


def test_it_writes_a_measured_preset(measured):
    out, _ = measured
    text, preset = out.read_text(), load_preset(out)
    assert text.startswith("# Measured by `flexray profile`")
    assert datetime.now(UTC).strftime("%Y-") in text.partition("\nsource")[0]
    assert not preset.estimate
    assert preset.source == "measured by flexray profile on 2 ranks on CPUs, 1 node"
    assert (preset.cluster_shape.gpus, preset.cluster_shape.gpus_per_node) == (2, 2)
    assert (preset.heads, preset.kv_heads, preset.degrees) == (4, 2, (1, 2))
    assert preset.max_length == 256
    assert list(preset.time.bandwidth_mb_per_ms) == [2]
    assert preset.cost.linear + preset.cost.quadratic + preset.cost.per_sequence > 0
    assert preset.cost.micro_step_ms + preset.cost.exchange_ms > 0
    assert yaml_text.load(text)["memory"]["parameters"] == preset.memory.parameters > 10_000
    assert preset.cost.state_mb == pytest.approx(preset.memory.parameters * 16 / 2**20, rel=1e-5)


def test_it_shows_coefficients_errors_and_a_picture(measured):
    out, done = measured
    for name in ("quadratic", "linear", "per_sequence", "micro_step_ms", "step_ms", "bandwidth 2"):
        assert re.search(rf"^ *{name} +[\d.e+-]+ +(?:ms|MB)", done.stdout, re.MULTILINE), name
    for kind in ("compute", "all-to-all, degree 2", "step"):
        assert re.search(rf"^ *{kind} +\d+ +[\d.]+% +[\d.]+%", done.stdout, re.MULTILINE), kind
    assert re.search(r"making a communicator: degree 2 [\d.]+ ms", done.stdout)
    assert re.search(r"^memory.*token.*", done.stdout, re.MULTILINE)
    assert f"planner.preset={out}" in done.stdout
    assert "<svg" in out.with_suffix(".svg").read_text()


def test_plan_and_train_take_it(measured, tmp_path, ray_address):
    out, _ = measured
    planned = run("-m", "flexray", "plan", "200,30,20", "--preset", str(out))
    assert planned.returncode == 0, planned.stderr
    assert "3 rows on 2 GPUs" in planned.stdout
    settings = ("run.name=two", "train.steps=3", "cluster.gpus=2", f"planner.preset={out}")
    code, output = finish(start(tmp_path, *settings, ray=ray_address))
    assert code == 0, output
    (first, *_) = events(tmp_path / "two", "step")
    assert first["model_version"] <= 1  # planned with the preset, before any report
    assert first["planned_s"] * 1e3 >= load_preset(out).cost.micro_step_ms


def test_a_bad_fit_is_one_line_and_writes_nothing(tmp_path, ray_address):
    out = tmp_path / "bad.yaml"
    done = profile("--out", out, "--set", "cluster.gpus=1", limit=-1, ray=ray_address)
    assert done.returncode == 1
    assert re.fullmatch(r"error: no preset was written: compute: half of .*\n", done.stderr)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--out", "there.yaml"], "there.yaml is there already: pass another, or --overwrite"),
        (["--out", "drawn.yaml"], "drawn.svg is there already"),
        (["--out", "preset.json"], "preset.json: give a file that ends in .yaml"),
        (["--out", "nowhere/preset.yaml"], "there is no folder nowhere"),
        (["--out", "folder.yaml", "--overwrite"], "folder.yaml is a folder"),
        (["--out", "new.yaml", "--set", "cluster.gpsu=2"], "did you mean"),
        (["--out", "new.yaml", "missing.yaml"], "missing.yaml: cannot read this config"),
        (["--out", "new.yaml", "--set", "planner.degrees=[3]"], "planner.degrees=[3]"),
        (
            ["--out", "new.yaml", "--set", "model.config.attention_dropout=0.1"],
            "attention_dropout=0.1 is not supported",
        ),
    ],
)
def test_bad_input_is_one_line(tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.yaml").write_text("mine")
    (tmp_path / "drawn.svg").write_text("mine")
    (tmp_path / "folder.yaml").mkdir()
    done = run("-m", "flexray", "profile", *arguments)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr and done.stderr.count("\n") == 1 and "Traceback" not in done.stderr
    assert not (tmp_path / "new.yaml").exists()
    assert (tmp_path / "there.yaml").read_text() == "mine"


def test_more_ranks_than_the_cluster_has_is_one_line(tmp_path, ray_address):
    done = profile("--out", tmp_path / "p.yaml", "--set", "cluster.gpus=1000", ray=ray_address)
    assert done.returncode == 2, done.stderr
    assert "1000" in done.stderr and done.stderr.count("\n") == 1
