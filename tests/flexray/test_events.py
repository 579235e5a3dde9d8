import dataclasses
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from flexray.errors import UserError
from flexray.events import (
    Cause,
    Event,
    EventLog,
    GenerationEvent,
    PlanLog,
    StepEvent,
)
from flexray.json_lines import JsonLinesWriter, read_json_lines
from flexray.solver.plan import Group, MicroStep, Plan

STEP = StepEvent(
    step=1,
    loss=5.5,
    tokens=100,
    label_tokens=96,
    rows=[7, 3, 12, 4],
    step_s=1.5,
    planned_s=1.4,
    plan_wait_s=0.001,
    solve_s=0.3,
    lower_bound_s=1.3,
    groups=[[4], [2, 1, 1]],
    generation=1,
    learning_rate=1e-3,
    skipped=False,
    model_version=2,
    idle=[0.1, 0.0],
)
GENERATION = GenerationEvent(
    generation=1,
    world=2,
    pids=[10, 11],
    nodes=["a", "a"],
    cause="start",
    pause_s=3.0,
    at_step=1,
    steps_again=0,
    form_s=0.5,
    build_s=0.25,
    restore_s=0.0,
    moved_mb=0.0,
    copies_mb=12.0,
)


def lines(path):
    return list(read_json_lines(path))


def test_events_read_back_with_kind_and_time(tmp_path):
    path = tmp_path / "events.jsonl"
    before = time.time()
    with EventLog(path) as log:
        log.write(GENERATION)
        log.write(STEP)
        generation, step = lines(path)  # readable while the run goes on
    assert before <= generation.pop("time") <= step.pop("time") <= time.time()
    assert generation == {"kind": "generation"} | dataclasses.asdict(GENERATION)
    assert step == {"kind": "step"} | dataclasses.asdict(STEP)


def test_every_line_is_strict_json(tmp_path):
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.write(
            dataclasses.replace(
                STEP,
                loss=float("nan"),
                step_s=float("inf"),
                tokens=np.int64(5),
                planned_s=np.float32("nan"),
                rows=np.array([1, 2]),
                groups=((2, 1), (3,)),
            )
        )

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    (line,) = path.read_text().splitlines()
    event = json.loads(line, parse_constant=refuse)
    assert (event["loss"], event["step_s"], event["planned_s"]) == (None, None, None)
    assert (event["tokens"], event["rows"], event["groups"]) == (5, [1, 2], [[2, 1], [3]])


def test_what_was_written_survives_sigkill(tmp_path):
    path = tmp_path / "log.jsonl"
    program = (
        "import os, sys, pathlib\n"
        "from flexray.json_lines import JsonLinesWriter\n"
        "log = JsonLinesWriter(pathlib.Path(sys.argv[1]))\n"
        "log.append({'a': 1}); log.append({'a': 2}); os.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", program, path]).returncode == -9
    assert lines(path) == [{"a": 1}, {"a": 2}]


def test_a_torn_last_line_is_left_out_and_then_cut_off(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": 2')
    assert lines(path) == [{"a": 1}]
    with JsonLinesWriter(path) as log:
        log.append({"a": 3})
    assert lines(path) == [{"a": 1}, {"a": 3}]


def test_a_whole_line_that_is_no_object_is_an_error(tmp_path):
    path = tmp_path / "log.jsonl"
    for bad in (b'{"a": 1}\n{"a"\n{"a": 2}\n', b'{"a": 1}\n[2]\n', b'{"a": 1}\n\xff\n'):
        path.write_bytes(bad)
        with pytest.raises(UserError, match=r"log\.jsonl: line 2 is not a JSON object"):
            lines(path)
    with pytest.raises(UserError, match="cannot read this file: No such file"):
        lines(tmp_path / "none.jsonl")


def test_plans_read_back_equal_with_their_step(tmp_path):
    plan = Plan(
        (MicroStep((Group(2, (0, 1), (0, 2), (50, 40), 9.0),), 10.0),), 10.0, 9.5, 0.1, "milp"
    )
    with PlanLog(tmp_path / "plans.jsonl") as log:
        log.write(4, 1, plan)
    (record,) = lines(tmp_path / "plans.jsonl")
    assert (record["step"], record["generation"]) == (4, 1)
    assert Plan.from_dict(record) == plan


def documented(section):
    """Keys in the first column of the table under a heading of docs/events.md."""
    text = (Path(__file__).parents[2] / "docs" / "events.md").read_text()
    body = text.split(f"\n{section}\n")[1].split("\n#")[0]
    return re.findall(r"^\| `(\w+)` \|", body, re.MULTILINE), body


KINDS = get_args(Event)


@pytest.mark.parametrize("event", KINDS)
def test_the_document_names_exactly_the_keys(event):
    keys, _ = documented(f"### kind `{event.kind}`")
    assert keys == [field.name for field in dataclasses.fields(event)]


def test_the_document_names_exactly_the_common_keys_and_the_plans(tmp_path):
    with EventLog(tmp_path / "e") as log:
        log.write(STEP)
    (event,) = lines(tmp_path / "e")
    own = [field.name for field in dataclasses.fields(StepEvent)]
    assert documented("## events.jsonl")[0] == [key for key in event if key not in own]

    with PlanLog(tmp_path / "p") as log:
        log.write(1, 1, Plan((), 0.0, 0.0, 0.0, ""))
    (record,) = lines(tmp_path / "p")
    keys, body = documented("## plans.jsonl")
    assert [*keys, *re.findall(r"`(\w+)`[,.]", body)] == list(record)


def test_the_document_names_exactly_the_causes():
    _, body = documented("### kind `generation`")
    cause = next(line for line in body.splitlines() if line.startswith("| `cause`"))
    assert re.findall(r"`(\w+)`", cause)[1:] == list(get_args(Cause))
