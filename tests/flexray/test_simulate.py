"""`flexray simulate`: figures against plans made by hand, resuming, refusals, pictures."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from flexray.cli import app
from flexray.commands.simulate import _shown, _strategies
from flexray.errors import UserError
from flexray.gantt import degree_colour
from flexray.json_lines import read_json_lines
from flexray.planning_input import Limit, OverLength
from flexray.presets import FOLDER, load_preset
from flexray.simulation import plots
from flexray.simulation.batches import Batches
from flexray.simulation.folder import SimulationFolder
from flexray.simulation.run import run
from flexray.simulation.strategies import STRATEGIES, Case, StepResult, simulate_step
from flexray.simulation.study import Study
from flexray.simulation.summary import StrategySummary, median_and_slowest, summarise
from flexray.solver.cluster import Cluster
from flexray.solver.cost import CostModel
from flexray.solver.plan import PlanningError

COST = CostModel(
    quadratic=0.0,
    linear=1.0,
    micro_step_ms=10.0,
    exchange_mb_per_token=1.0,
    bandwidth=((4, 2.0),),
    tokens_per_gpu=100,
)
DEGREES = (1, 2, 4)
TIMES = ("solve_s", "planning_mean_s", "planning_p95_s")


def skewed(rows: int, longest: int = 6000) -> list[int]:
    """Mostly short, a few long."""
    rng = np.random.default_rng(0)
    return [int(x) for x in np.minimum(np.exp(rng.normal(5, 1.3, rows)) + 1, longest)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "lengths.parquet"
    pyarrow.parquet.write_table(pa.table({"length": skewed(50)}), path)
    return path


# 50 rows are two full batches of 20; the default asks for 40.
OPTIONS = ("--preset", "cpu", "--batch-size", "20")
FEWER = "the rows make 2 full batches of 20 from batch 0 on: simulating these instead of 40\n"
QUICK = ("static", "batch-adaptive", "megatron", "karmarkar-karp", "flexray")
# Five strategies on four GPUs, three on 1, 2, 8 and 16.
PLANS = 2 * (5 + 3 * 4)


def program(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flexray", "simulate", *map(str, words)],
        capture_output=True,
        text=True,
        **options,
    )


@pytest.fixture(scope="module")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A whole simulation: its folder and what it printed."""
    out = tmp_path_factory.mktemp("sim") / "deep" / "er"
    done = program(data, *OPTIONS, "--out", out, "--json")
    assert (done.returncode, done.stderr) == (0, FEWER)
    return out, json.loads(done.stdout)


# Figures


def test_where_the_time_of_a_step_goes() -> None:
    # 300 tokens in a group of four: 300 / 4 ms of compute, as many / 2 of all-to-all.
    result = simulate_step("static", Case(7, (300, 0), 300, COST, Cluster((4,)), DEGREES))
    assert result.groups == [[4]] and result.row_degrees == [4, 0] and result.batch == 7
    assert result.planned_ms == pytest.approx(75 + 37.5 + 10)
    assert result.idle == pytest.approx(0)
    assert result.exchange == pytest.approx(37.5 / 122.5)
    assert result.collectives == pytest.approx(10 / 122.5)
    # One GPU works, three wait; no all-to-all.
    result = simulate_step("static", Case(0, (80,), 80, COST, Cluster((4,)), DEGREES))
    assert (result.idle, result.exchange) == (pytest.approx(3 / 4 * 80 / 90), pytest.approx(0))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_plans(strategy: str) -> None:
    lengths = (300, 90, 80, 70, 0, 20)
    result = simulate_step(strategy, Case(0, lengths, 300, COST, Cluster((4,)), DEGREES))
    assert result.strategy == strategy and result.planned_ms >= result.lower_bound_ms > 0
    assert [d == 0 for d in result.row_degrees] == [length == 0 for length in lengths]
    assert result.row_degrees[0] == 4  # no other holds 300 tokens
    compute = 1 - result.idle - result.exchange - result.collectives
    assert 4 * result.planned_ms * compute == pytest.approx(sum(lengths))  # 1 ms a token


def test_static_is_one_degree_for_all_batches() -> None:
    short = (50, 40, 30)
    cluster = Cluster((4,))
    for longest, degree in ((50, 1), (150, 2), (300, 4)):
        result = simulate_step("static", Case(0, short, longest, COST, cluster, DEGREES))
        assert {d for groups in result.groups for d in groups} == {degree}
    study = Study(cut([300, 1, 50, 40], 2), COST, cluster, DEGREES, ("static",))
    assert [simulate_step(*task).groups for task in study.tasks] == [[[4]], [[4]]]


def cut(lengths: list[int], size: int, **options: Any) -> Batches:
    given = {
        "limit": Limit(10_000, "limit"),
        "policy": OverLength.ERROR,
        "first": 0,
        "steps": 99,
    } | options
    return Batches.cut(np.array(lengths), size=size, **given)


def step(strategy: str, batch: int, ms: float, bound: float, **shares: Any) -> StepResult:
    given = {"idle": 0.0, "exchange": 0.0, "collectives": 0.0, "solve_s": 1.0} | shares
    return StepResult(4, strategy, batch, ms, bound, groups=[], row_degrees=[], **given)


def test_the_summary_is_of_total_time() -> None:
    static, ours = summarise(
        [
            step("static", 0, 300, 90),
            step("static", 1, 100, 50),
            step("flexray", 0, 110, 100, idle=0.1, solve_s=3.0),
            step("flexray", 1, 50, 40, idle=0.5, exchange=0.2, collectives=0.2),
        ]
    )
    assert (static.speedup, ours.speedup) == (1.0, pytest.approx(400 / 160))
    assert ours.mean_step_ms == 80
    assert ours.idle == pytest.approx((11 + 25) / 160)
    # Every strategy is held against the tightest bound of its batch.
    assert static.gap == pytest.approx((2.0 + 1.0) / 2)
    assert ours.gap == pytest.approx((0.1 + 0.0) / 2)
    assert (ours.planning_mean_s, ours.planning_p95_s) == (2.0, pytest.approx(2.9))
    assert sum(ours.parts_ms.values()) == pytest.approx(80)
    assert ours.parts_ms["all-to-all"] == pytest.approx(10 / 2)


def test_median_and_slowest_step() -> None:
    steps = [step("flexray", i, ms, 1) for i, ms in enumerate((5, 9, 7, 1))]
    assert [s.batch for s in median_and_slowest(steps)] == [0, 1]
    assert [s.batch for s in median_and_slowest(steps[:1])] == [0, 0]


# The whole program


def test_the_results_are_there(finished: Any, data: Path) -> None:
    out, summary = finished
    assert json.loads((out / "summary.json").read_text()) == summary
    assert summary["finished"] and summary["preset"]["estimate"]
    names = [s["strategy"] for s in summary["strategies"]]
    assert names == list(QUICK)
    by_name = {s["strategy"]: s for s in summary["strategies"]}
    assert by_name["static"]["speedup"] == 1
    assert by_name["flexray"]["speedup"] >= by_name["batch-adaptive"]["speedup"] >= 1
    assert by_name["flexray"]["speedup"] > 1.05
    assert 0 <= by_name["flexray"]["gap"] < by_name["static"]["gap"]
    lengths = skewed(50)[:40]
    assert (summary["rows"], summary["tokens"], summary["longest"]) == (
        40, sum(lengths), max(lengths),
    )  # fmt: skip

    steps = list(read_json_lines(out / "steps.jsonl"))
    of_cluster = [s for s in steps if s["gpus"] == 4]
    assert sorted((s["strategy"], s["batch"]) for s in of_cluster) == sorted(
        (name, batch) for name in QUICK for batch in range(2)
    )
    case = Case(
        1, tuple(lengths[20:40]), max(lengths), load_preset("cpu").cost, Cluster((4,)), (1, 2, 4, 8)
    )
    again = simulate_step("flexray", case).to_dict()
    kept = next(s for s in of_cluster if s["strategy"] == "flexray" and s["batch"] == 1)
    assert {k: v for k, v in kept.items() if k not in TIMES} == {
        k: v for k, v in again.items() if k not in TIMES
    }

    sizes = {s["gpus"]: s["speedup"] for s in summary["cluster_sizes"]}
    assert list(sizes) == [1, 2, 4, 8, 16]
    assert sizes[4]["flexray"] == pytest.approx(by_name["flexray"]["speedup"])
    assert all(set(s) == {"static", "batch-adaptive", "flexray"} for s in sizes.values())
    for name in ("speedup", "lengths", "cluster-sizes", "step-median", "step-slowest"):
        assert (out / f"{name}.svg").read_text().rstrip().endswith("</svg>")
    drawn = summary["drawn_steps"]
    times = sorted(s["planned_ms"] for s in of_cluster if s["strategy"] == "flexray")
    assert [drawn[k]["planned_ms"] for k in ("median", "slowest")] == times


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_times(v) for k, v in value.items() if k not in TIMES}
    return [without_times(v) for v in value] if isinstance(value, list) else value


def test_a_finished_simulation_is_shown_again_without_ray_or_torch(
    finished: Any, data: Path
) -> None:
    out, summary = finished
    before = (out / "steps.jsonl").read_bytes()
    code = (
        "import sys\n"
        "from flexray.cli import app\n"
        "app(sys.argv[1:], standalone_mode=False)\n"
        "sys.exit(int(bool({'ray', 'torch'} & set(sys.modules))))"
    )
    words = ("simulate", str(data), *OPTIONS, "--out", str(out))
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, FEWER)
    assert (out / "steps.jsonl").read_bytes() == before
    assert json.loads((out / "summary.json").read_text()) == summary
    table = done.stdout.splitlines()[:5]
    assert max(map(len, table)) <= 80 and "\N{HORIZONTAL ELLIPSIS}" not in done.stdout
    for words in ("static", "batch-adaptive", "flexray", "1.00x", "(an estimate)", "steps.jsonl"):
        assert words in done.stdout


def test_ctrl_c_keeps_what_is_done_and_the_same_command_goes_on(
    finished: Any, data: Path, tmp_path: Path
) -> None:
    words = [sys.executable, "-m", "flexray", "simulate", str(data), *OPTIONS]
    going = subprocess.Popen(
        [*words, "--out", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    steps = tmp_path / "steps.jsonl"
    while not steps.exists() or steps.read_bytes().count(b"\n") < 3:
        assert going.poll() is None
        time.sleep(0.01)
    # Planning processes pay no heed to it.
    for child in psutil.Process(going.pid).children(recursive=True):
        child.send_signal(signal.SIGINT)
    before = steps.read_bytes().count(b"\n")
    while steps.read_bytes().count(b"\n") < before + 3:
        assert going.poll() is None
        time.sleep(0.01)
    os.killpg(going.pid, signal.SIGINT)  # as a terminal does: to the whole group
    out, err = going.communicate(timeout=20)
    assert (going.returncode, out) == (130, "")
    assert re.fullmatch(
        rf"{FEWER}stopped: \d+ of {PLANS} plans are done and kept in .*; the same .*\n", err
    )
    assert is_gone(going.pid)
    assert not json.loads((tmp_path / "summary.json").read_text())["finished"]
    kept = steps.read_bytes()
    assert 3 <= kept.count(b"\n") < PLANS

    steps.write_bytes(kept + b'{"gpus": 4, "strat')  # a line that a crash left half-written
    done = program(data, *OPTIONS, "--out", tmp_path, "--json")
    assert (done.returncode, done.stderr) == (0, FEWER)
    assert steps.read_bytes().startswith(kept) and steps.read_bytes().count(b"\n") == PLANS
    assert without_times(json.loads(done.stdout)) == without_times(finished[1])


def test_a_killed_simulation_leaves_no_process(data: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "flexray", "simulate", str(data), *OPTIONS]
    going = subprocess.Popen(
        [*words, "--out", str(tmp_path)], stderr=subprocess.DEVNULL, start_new_session=True
    )
    while not (tmp_path / "steps.jsonl").exists() or not (tmp_path / "steps.jsonl").stat().st_size:
        assert going.poll() is None
        time.sleep(0.01)
    going.kill()
    going.wait()
    assert is_gone(going.pid)


def is_gone(group: int) -> bool:
    """Whether no process of the group runs any more; ends those that do."""
    deadline = time.monotonic() + 20
    while left := list(running(group)):
        if time.monotonic() > deadline:
            for process in left:
                process.kill()
            return False
        time.sleep(0.05)
    return True


def running(group: int) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        # What is defunct is gone: in a container nobody may collect it.
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                yield process


# Settings and refusals


def refused(*words: object) -> str:
    with pytest.raises((UserError, PlanningError)) as caught:
        app(["simulate", *map(str, words)], standalone_mode=False)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("--batch-size", "10"), "batch size was 20 and is 10"),
        (("--steps", "1"), "steps was 2 and is 1"),
        (("--gpus", "8"), "gpus was 4 and is 8"),
        (("--strategies", "flexray"), "its strategies differ"),
        (("--max-length", "9999"), "max length was 65044 and is 9999"),
    ],
)
def test_other_settings_are_refused(finished: Any, data: Path, change: Any, says: str) -> None:
    out, summary = finished
    message = refused(data, *OPTIONS, *change, "--out", out)
    assert says in message and "--overwrite" in message
    assert json.loads((out / "summary.json").read_text()) == summary


def test_another_cost_model_is_refused(finished: Any, data: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text((FOLDER / "cpu.yaml").read_text().replace("per_token: 0.05", "per_token: 0.06"))
    words = ("--preset", path, "--batch-size", "20", "--out", finished[0])
    assert "its coefficients differ" in refused(data, *words)
    # The same figures under another name are the same simulation.
    path.write_text((FOLDER / "cpu.yaml").read_text())
    settings = json.loads((finished[0] / "summary.json").read_text())["settings"]
    assert load_preset(path).cost == load_preset("cpu").cost and "cpu" not in settings.values()


def test_overwrite_removes_only_what_a_simulation_wrote(tmp_path: Path) -> None:
    folder = SimulationFolder.open(tmp_path, {"lengths": "a" * 64})
    folder.steps_path.write_text("{}\n")
    mine = tmp_path / "notes.txt"
    mine.write_text("mine")
    assert SimulationFolder.open(tmp_path, {"lengths": "a" * 64}).steps_path.exists()
    with pytest.raises(UserError, match=r"its lengths differ.*--overwrite"):
        SimulationFolder.open(tmp_path, {"lengths": "b" * 64})
    SimulationFolder.open(tmp_path, {"lengths": "b" * 64}, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "summary.json"]


# `simulate` has no --capacity.
CAPACITY = (
    rf"row 1 has length {2**40} and the capacity is 65044 tokens \(4 GPUs x 16261\): "
    "use more --gpus or pass --over-length drop"
)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("5,-3", "--batch-size", "1"), "row 1 has length -3"),
        (("5,9000", "--batch-size", "1", "--max-length", "8000"), "row 1 has length 9000 .*8000"),
        (("5", "--batch-size", "1", "--max-length", "0"), "--max-length 0"),
        ((f"5,{2**40}", "--batch-size", "1"), CAPACITY),
        (("5,99999", "--batch-size", "1", "--max-length", "100000"), "99999 tokens fits in no gro"),
        (("5,6", "--batch-size", "3"), "2 rows .* make 0 full batches of 3"),
        (
            ("5,6", "--batch-size", "1", "--first-batch", "2"),
            "make 2 full batches of 1 and batch 2",
        ),
        (("5,6", "--batch-size", "0"), "--batch-size 0: give at least 1"),
        (("5,6", "--batch-size", "1", "--steps", "0"), "--steps 0: give at least 1"),
        (("5,6", "--batch-size", "1", "--first-batch", "-1"), "--first-batch -1"),
        (("0,0", "--batch-size", "1"), "all rows have length 0"),
        (("5", "--batch-size", "1", "--gpus", "0"), "0 GPUs"),
        (("5", "--batch-size", "1", "--degrees", "8"), "no legal degree"),
        (("5", "--batch-size", "1", "--degrees", "two"), "--degrees two"),
        (("5", "--batch-size", "1", "--strategies", "flexay"), "did you mean flexray"),
        (("5", "--batch-size", "1", "--strategies", "best"), "no strategy best: there are static"),
        (("5,x", "--batch-size", "1"), "neither a file"),
    ],
)
def test_what_cannot_be_simulated_is_one_line(
    tmp_path: Path, words: tuple[str, ...], says: str
) -> None:
    out = tmp_path / "out"
    assert re.search(says, refused(*words, "--preset", "cpu", "--out", out))
    assert not out.exists()


def test_the_program_prints_one_line_and_exits_with_2(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    done = program("5", "--batch-size", "1", "--steps", "1", "--preset", "cpu", "--out", file)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"error: --out .*file: cannot be written: .*\n", done.stderr)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("summary.json", "{}", "is not of a simulation"),
        ("summary.json", "nonsense", "is not of a simulation"),
        ("steps.jsonl", '{"step": 1}\n', "steps without a summary"),
    ],
)
def test_files_of_something_else_are_kept(tmp_path: Path, name: str, text: str, says: str) -> None:
    (tmp_path / name).write_text(text)
    options = ("--batch-size", "1", "--steps", "1", "--preset", "cpu", "--out", tmp_path)
    assert says in refused("5", *options)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == text


def test_a_plan_that_fails_in_a_planning_process_is_one_line(tmp_path: Path) -> None:
    case = Case(1, (5, 401), 401, COST, Cluster((4,)), DEGREES)
    with pytest.raises(PlanningError, match="flexray, batch 1: row 1 has length 401"):
        run([("flexray", case)], tmp_path / "steps.jsonl")


# Batches


def test_over_long_rows_go_first_then_full_batches_are_cut() -> None:
    batches = cut(
        [9, 900, 8, 7, 900, 6, 5, 900, 4],
        2,
        limit=Limit(100, "limit"),
        policy=OverLength.DROP,
        first=1,
    )
    assert [b.tolist() for b in batches.lengths] == [[7, 6], [5, 4]]
    assert (batches.over_long, batches.longest, batches.rows, batches.tokens) == (2, 7, 4, 22)
    assert cut([5, 0, 4, 9], 2, steps=1).zero_length == 1
    assert [b.tolist() for b in cut([1, 2, 3, 4, 5], 2).lengths] == [[1, 2], [3, 4]]


def test_cluster_sizes_hold_the_longest_row() -> None:
    def sizes(longest: int, gpus: int) -> list[int]:
        degrees = (1, 2, 4, 8, 16, 32)
        study = Study(
            cut([longest], 1), COST, Cluster.uniform(gpus, 2), degrees, ("static", "flexray")
        )
        return list(dict.fromkeys(case.cluster.gpus for _, case in study.tasks))

    assert sizes(100, 8) == [8, 2, 4, 16, 32]
    assert sizes(350, 8) == [8, 4, 16, 32]
    assert sizes(100, 6) == [6, 3, 12, 24]
    study = Study(cut([9], 1), COST, Cluster((2, 2)), DEGREES, ("static", "flexray"))
    assert {case.cluster.node_sizes for _, case in study.tasks} == {
        (1,), (2,), (2, 2), (2,) * 4, (2,) * 8,
    }  # fmt: skip


def test_static_is_always_among_the_strategies() -> None:
    assert _strategies("flexray, megatron") == ("static", "megatron", "flexray")
    assert _strategies("all") == tuple(STRATEGIES)
    assert _shown(_strategies("all")) == "flexray"
    assert _shown(_strategies("megatron,flexsp")) == "megatron"


# Pictures


def share(path: Path, colour: str) -> float:
    image = imread(path)
    return float(np.all(np.abs(image[:, :, :3] - to_rgb(colour)) < 0.004, axis=2).mean())


def summary(name: str, ms: float, speedup: float, **shares: float) -> StrategySummary:
    given = {"idle": 0.0, "exchange": 0.0, "collectives": 0.0} | shares
    return StrategySummary(name, ms, speedup, gap=0.1, planning_mean_s=1, planning_p95_s=1, **given)


def test_areas_of_the_parts_are_their_times(tmp_path: Path) -> None:
    path = tmp_path / "speedup.png"
    plots.draw_speedups(
        [summary("static", 8000, 1, idle=0.5, exchange=0.25), summary("flexray", 4000, 2)],
        "caption",
        path,
    )
    unit = share(path, plots._PARTS["all-to-all"]) / 2
    assert share(path, plots._PARTS["idle"]) / unit == pytest.approx(4, rel=0.1)
    assert share(path, plots._PARTS["compute"]) / unit == pytest.approx(2 + 4, rel=0.1)
    assert share(path, plots._OURS) / share(path, plots._PALE) == pytest.approx(2, rel=0.05)


def test_areas_of_the_histogram_are_rows_and_tokens(tmp_path: Path) -> None:
    path = tmp_path / "lengths.png"
    lengths, degrees = np.array([10] * 30 + [1000] * 10), np.array([1] * 30 + [8] * 10)
    plots.draw_lengths(lengths, degrees, "flexray", "caption", path)
    # Above 30 rows against 10, below 3% of the tokens against 97%: each panel as high as its bar.
    above = 1 + 300 / 10_000
    below = 1 / 3 + 1
    ratio = share(path, degree_colour(1)) / share(path, degree_colour(8))
    assert ratio == pytest.approx(above / below, rel=0.15)


def test_degrees_are_stacked_in_the_histogram(tmp_path: Path) -> None:
    path = tmp_path / "lengths.png"
    plots.draw_lengths(np.full(40, 10), np.array([1] * 30 + [8] * 10), "flexray", "caption", path)
    image = imread(path)[150:, :, :3]  # without the legend
    columns = [
        np.all(np.abs(image - to_rgb(degree_colour(d))) < 0.004, axis=2).any(axis=0) for d in (1, 8)
    ]
    assert columns[0].any() and np.array_equal(*columns)


def test_the_same_results_give_the_same_files(tmp_path: Path) -> None:
    by_size = {
        gpus: [summary("static", 9, 1), summary("flexray", 5, speedup)]
        for gpus, speedup in ((4, 1.5), (8, 1.8))
    }
    for name in "ab":
        plots.draw_cluster_sizes(by_size, "caption", tmp_path / f"{name}.svg")
        plots.draw_speedups(by_size[4], "caption", tmp_path / f"{name}2.svg")
    for name in ("", "2"):
        assert (tmp_path / f"a{name}.svg").read_bytes() == (tmp_path / f"b{name}.svg").read_bytes()
