"""`flexray plan` as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from flexray.cli import app
from flexray.errors import UserError
from flexray.gantt import draw_step
from flexray.presets import load_preset
from flexray.solver.cluster import Cluster
from flexray.solver.plan import Plan, PlanningError
from flexray.solver.verify import verify

SMALL = ("--gpus", "4", "--capacity", "20")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]):
    def run(*words: str) -> str:
        with pytest.raises(SystemExit) as stopped:
            app(["plan", *words])
        assert stopped.value.code == 0
        return capsys.readouterr().out

    return run


def refused(*words: str) -> str:
    with pytest.raises((UserError, PlanningError)) as caught:
        app(["plan", *words], standalone_mode=False)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_json_is_the_documented_schema(run) -> None:
    data: dict[str, Any] = json.loads(run("30,9,0,8", *SMALL, "--json"))
    assert list(data) == [
        "planned_ms", "lower_bound_ms", "gap", "solve_s", "method", "dropped", "micro_steps",
    ]  # fmt: skip
    assert data["dropped"] == [{"row": 2, "length": 0, "why": "row 2 of the batch has no token"}]
    group = data["micro_steps"][0]["groups"][0]
    assert list(group) == ["degree", "ranks", "rows", "lengths", "tokens", "planned_ms"]
    assert group["tokens"] == sum(group["lengths"])
    cost = load_preset("gpt-7b-a100-40g").cost.with_capacity(20)
    verify(Plan.from_dict(data), [30, 9, 0, 8], cost, Cluster((4,)), (1, 2, 4))


def test_the_table_names_groups_bound_and_speed_up(run) -> None:
    out = run("60,9,9,9,8,8,8", *SMALL)
    for words in ("micro-step", "no plan is under", "static", "best single degree"):
        assert words in out


@pytest.mark.parametrize("suffix", ["parquet", "csv", "jsonl", "arrow"])
def test_files_with_a_length_column(run, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"data.{suffix}"
    table = pa.table({"name": ["a", "b", "c"], "length": pa.array([30, 9, 8], pa.int32())})
    if suffix == "parquet":
        pyarrow.parquet.write_table(table, path)
    elif suffix == "csv":
        pyarrow.csv.write_csv(table, path)
    elif suffix == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    assert rows_of(json.loads(run(str(path), *SMALL, "--json"))) == {0: 30, 1: 9, 2: 8}


def rows_of(data: dict[str, Any]) -> dict[int, int]:
    return {
        row: length
        for step in data["micro_steps"]
        for group in step["groups"]
        for row, length in zip(group["rows"], group["lengths"], strict=True)
    }


def test_over_long_rows_go_first_then_batches_are_cut(run) -> None:
    lengths = "5,200,6,300,7,8,9,400"
    options = (*SMALL, "--max-length", "100", "--over-length", "drop", "--json")
    data = json.loads(run(lengths, *options, "--batch-size", "2", "--batch", "1"))
    assert rows_of(data) == {0: 7, 1: 8}
    assert [(d["row"], d["length"]) for d in data["dropped"]] == [(3, 300)]
    last = json.loads(run(lengths, *options, "--batch-size", "2", "--batch", "2"))
    assert rows_of(last) == {0: 9}
    assert [d["row"] for d in last["dropped"]] == [7]
    whole = json.loads(run(lengths, *options))
    assert rows_of(whole) == {0: 5, 1: 6, 2: 7, 3: 8, 4: 9}
    assert [d["row"] for d in whole["dropped"]] == [1, 3, 7]


def test_without_a_limit_rows_over_the_cluster_can_be_dropped(run) -> None:
    data = json.loads(run("5,81,80", *SMALL, "--over-length", "drop", "--json"))
    assert rows_of(data) == {0: 5, 1: 80}


def test_left_out_rows_say_what_their_numbers_count(run) -> None:
    words = ("200,0,5,0,9", *SMALL, "--over-length", "drop", "--batch-size", "4")
    dropped = json.loads(run(*words, "--json"))["dropped"]
    assert [(d["row"], d["length"], d["why"]) for d in dropped] == [
        (0, 200, "row 0 of the input is over 80 tokens"),
        (0, 0, "row 0 of the batch has no token"),
        (2, 0, "row 2 of the batch has no token"),
    ]
    out = run(*words)
    for d in dropped:
        assert f"left out: {d['why']} (length {d['length']})" in out
    words_of_help = " ".join(run("--help").split())
    assert "over-long rows by their position in the input" in words_of_help
    assert "all others by their position in the batch" in words_of_help


@pytest.mark.parametrize(
    ("words", "left_out"),
    [
        (("0,0", *SMALL), ["row 0 of the batch has no token", "row 1 of the batch has no token"]),
        (("999", *SMALL, "--over-length", "drop"), ["row 0 of the input is over 80 tokens"]),
        (("empty.parquet", *SMALL), []),
    ],
    ids=["zero lengths", "all dropped", "no rows"],
)
def test_nothing_left_to_plan_is_said(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], left_out
) -> None:
    monkeypatch.chdir(tmp_path)
    table = pa.table({"length": pa.array([], pa.int64())})
    pyarrow.parquet.write_table(table, "empty.parquet")
    first, *rest = run(*words).splitlines()
    assert first == "nothing is left to plan"
    assert len(rest) == len(left_out)
    for line, why in zip(rest, left_out, strict=True):
        assert line.startswith(f"left out: {why}")
    run(*words, "--plot", "plan.svg")
    assert Path("plan.svg").exists()
    assert json.loads(run(*words, "--json"))["micro_steps"] == []


def test_the_preset_brings_its_cluster_and_degrees(run) -> None:
    data = json.loads(run("190000,500", "--preset", "gpt-7b-a100-40g", "--json"))
    degrees = [g["degree"] for m in data["micro_steps"] for g in m["groups"]]
    assert max(degrees) >= 32


def test_gpus_per_node_counts_without_gpus(run) -> None:
    # Two pairs fit side by side on a node of four, and not on nodes of three and one.
    words = ("900,900", "--preset", "cpu", "--degrees", "2", "--json")
    for options, groups in (((), 2), (("--gpus-per-node", "3"), 1)):
        steps = json.loads(run(*words, *options))["micro_steps"]
        assert [len(step["groups"]) for step in steps] == [groups]


def test_degrees_come_from_heads(run) -> None:
    words = ("60,60,9,9,8", "--gpus", "6", "--capacity", "20", "--json")
    data = json.loads(run(*words, "--heads", "6", "--kv-heads", "2"))
    degrees = {g["degree"] for m in data["micro_steps"] for g in m["groups"]}
    assert degrees <= {1, 2, 6}
    data = json.loads(run(*words, "--degrees", "3"))
    assert {g["degree"] for m in data["micro_steps"] for g in m["groups"]} == {3}


def test_the_plan_is_drawn_beside_what_is_printed(run, tmp_path: Path) -> None:
    drawing, again = tmp_path / "plan.svg", tmp_path / "again.svg"
    data = json.loads(run("60,9,9,9,8", *SMALL, "--json", "--plot", str(drawing)))
    plan = Plan.from_dict(data)
    draw_step(plan, Cluster((4,)), again)
    assert plan.micro_steps and drawing.read_bytes() == again.read_bytes()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("5", *SMALL, "--plot", "plan.txt"), "--plot plan.txt: .*svg"),
        (("5", *SMALL, "--plot", "nowhere/plan.svg"), "nowhere/plan.svg: cannot be written"),
        (("5", *SMALL, "--max-length", "0"), "--max-length 0"),
        (("21", "--gpus", "1", "--capacity", "20"), "row 0 has length 21 .*20 tokens"),
        (("5,200", *SMALL, "--max-length", "100"), "row 1 has length 200 .*100 tokens"),
        (("5,-3", *SMALL), "row 1 has length -3"),
        (("5", "--gpus", "0", "--capacity", "20"), "0 GPUs"),
        (("5", "--gpus", "4", "--capacity", "0"), "capacity must be at least 1"),
        (("5", *SMALL, "--degrees", "8"), "no legal degree"),
        (("5", *SMALL, "--degrees", "two"), "--degrees two"),
        (("5", *SMALL, "--heads", "6", "--kv-heads", "4"), "no multiple"),
        (("5", "--gpus", "4"), "--preset"),
        (("5", "--capacity", "20"), "--gpus"),
        (("5", *SMALL, "--preset", "gpt-8b"), "no preset gpt-8b"),
        (("5,x", *SMALL), "neither a file"),
        ((str(2**70), *SMALL), "2\\^63"),
        (("5,6", *SMALL, "--batch-size", "2", "--batch", "1"), "1 batches of 2"),
        (("5,6", *SMALL, "--batch-size", "0"), "--batch-size 0"),
    ],
)
def test_what_cannot_be_planned_is_one_line(words: tuple[str, ...], says: str) -> None:
    import re

    assert re.search(says, refused(*words))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ("5,21,22", "--gpus", "4", "--capacity", "5"),
            "row 1 has length 21 and the capacity is 20 tokens (4 GPUs x 5) (1 more rows are too "
            "long): raise --capacity, use more --gpus, or pass --over-length drop",
        ),
        (
            ("21", "--gpus", "1", "--capacity", "20"),
            "row 0 has length 21 and the capacity is 20 tokens (1 GPU x 20): raise --capacity, "
            "use more --gpus, or pass --over-length drop",
        ),
        # More GPUs make no larger group where the heads or the user allow none.
        (
            ("21", "--gpus", "4", "--capacity", "10", "--heads", "2"),
            "row 0 has length 21 and the capacity is 20 tokens (2 GPUs x 10): raise --capacity "
            "or pass --over-length drop",
        ),
        (
            ("21", "--gpus", "4", "--capacity", "20", "--degrees", "1"),
            "row 0 has length 21 and the capacity is 20 tokens (1 GPU x 20): raise --capacity "
            "or pass --over-length drop",
        ),
        (
            ("21", *SMALL, "--max-length", "20"),
            "row 0 has length 21 and the limit is 20 tokens: raise --max-length or pass "
            "--over-length drop",
        ),
        # No group takes more, whatever it holds.
        (
            (str(2**40), "--gpus", "4", "--capacity", str(2**41)),
            f"row 0 has length {2**40} and the capacity is {2**31 - 1} tokens (1 GPU x "
            f"{2**31 - 1}): pass --over-length drop",
        ),
    ],
)
def test_over_capacity_names_row_length_capacity_and_what_helps(
    words: tuple[str, ...], says: str
) -> None:
    assert refused(*words) == says


def test_files_that_are_no_lengths_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    pyarrow.parquet.write_table(pa.table({"tokens": [1]}), path)
    assert "no column `length`; it has tokens" in refused(str(path), *SMALL)
    pyarrow.parquet.write_table(pa.table({"length": [1.5]}), path)
    assert "not whole numbers" in refused(str(path), *SMALL)
    pyarrow.parquet.write_table(pa.table({"length": [1, None]}), path)
    assert "1 empty cells" in refused(str(path), *SMALL)
    lengths = pa.array([2**63 - 1, 2**63], pa.uint64())
    pyarrow.parquet.write_table(pa.table({"length": lengths}), path)
    assert f"{path}: column `length` holds numbers over 2^63" in refused(str(path), *SMALL)
    path.write_bytes(b"nothing")
    assert "cannot be read" in refused(str(path), *SMALL)
    other = tmp_path / "data.txt"
    other.write_text("5")
    assert "give a .parquet" in refused(str(other), *SMALL)


def test_the_program_prints_one_line_and_exits_with_2() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flexray", "plan", "21", "--gpus", "1", "--capacity", "20"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr


def test_planning_loads_neither_ray_nor_torch() -> None:
    code = (
        "import sys; from flexray.commands import plan; from flexray.solver import planner;"
        "sys.exit(int(bool({'ray', 'torch'} & set(sys.modules))))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
