"""The program as a user runs it: a process of its own, its exit code and what it prints."""

import inspect
import json
import os
import resource
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import flexray
from flexray.cli import COMMANDS

SCRIPT = Path(sys.executable).with_name("flexray")


def run(*arguments, command=(sys.executable, "-m", "flexray"), env=None):
    return subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "100"} | (env or {}),
    )


def test_help_names_every_command():
    done = run("--help")
    assert done.returncode == 0
    assert done.stderr == ""
    for name, summary in COMMANDS.items():
        assert f" {name} " in done.stdout
        assert summary[:40] in done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_a_page_of_help(name):
    assert (Path(flexray.__file__).parent / "commands" / f"{name}.py").exists()
    done = run(name, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"Usage: flexray {name}" in done.stdout
    documented = inspect.getdoc(getattr(import_module(f"flexray.commands.{name}"), name))
    assert documented.splitlines()[0] == COMMANDS[name]


def test_help_takes_under_half_a_second_of_cpu():
    run("--help")  # compiled and cached
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run("--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime < 0.5


def test_the_script_and_the_module_are_one_program():
    assert run("--help").stdout == run("--help", command=[SCRIPT]).stdout
    version = run("--version")
    assert (version.returncode, version.stdout) == (0, f"flexray {flexray.__version__}\n")


@pytest.mark.parametrize("arguments", [["dcotor"], ["doctor", "--jsn"], ["doctor", "x"]])
def test_usage_errors_exit_2(arguments):
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Usage: flexray" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_misspelt_command_is_guessed():
    assert "Did you mean 'doctor'?" in run("dcotor").stderr


# A command that raises, in the real program.
RAISING = """
import os, signal, sys, time
from flexray.__main__ import main
from flexray.cli import app
from flexray.datasets.errors import CorpusError
from flexray.errors import UserError
from flexray.solver.plan import PlanningError

class RayTaskError(ValueError):  # as ray.exceptions.RayTaskError.as_instanceof_cause makes it
    cause = PlanningError("row 3 is too long")

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(10)

@app.command("raise")
def fail():
    {body}

main()
"""


@pytest.mark.parametrize(
    ("body", "code", "stderr"),
    [
        ("raise UserError('what is\\n wrong')", 2, "error: what is wrong\n"),
        ("raise PlanningError('row 3 is too long')", 2, "error: row 3 is too long\n"),
        ("raise CorpusError('no such corpus')", 2, "error: no such corpus\n"),
        ("raise RayTaskError('a traceback')", 2, "error: row 3 is too long\n"),
        ("interrupt()", 130, ""),
    ],
)
def test_what_the_user_can_put_right_is_one_line(body, code, stderr):
    program = RAISING.format(body=body)
    done = run("raise", command=(sys.executable, "-c", program))
    assert (done.returncode, done.stdout, done.stderr) == (code, "", stderr)


@pytest.mark.parametrize("error", ["ValueError", "RuntimeError", "KeyError"])
def test_a_bug_keeps_its_plain_traceback(error):
    program = RAISING.format(body=f"raise {error}('a bug')")
    done = run("raise", command=(sys.executable, "-c", program))
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback (most recent call last):\n")
    assert done.stderr.endswith(("a bug\n", "'a bug'\n"))


def test_doctor_as_json_and_as_a_page():
    report = json.loads(run("doctor", "--json").stdout)
    found = {finding["name"]: finding for finding in report["findings"]}
    assert found["FlexRay"] == {"name": "FlexRay", "status": "ok", "detail": flexray.__version__}
    assert [backend["name"] for backend in report["attention"]] == ["flash", "varlen", "sdpa"]
    page = run("doctor")
    assert page.returncode == 0
    for finding in report["findings"]:
        assert finding["name"] in page.stdout
    for value in report["used"].values():
        assert value in page.stdout
