"""Dependencies point one way: jobs -> flexray -> actors -> solver, datasets."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("solver", "datasets", "actors", "jobs", "flexray")

# What each part may import of FlexRay, and which heavy libraries it may not.
MAY = {
    "solver": ("flexray.solver",),
    "datasets": ("flexray.datasets",),
    "actors": ("flexray.actors", "flexray.solver", "flexray.datasets"),
    "flexray": ("flexray",),
    "jobs": ("flexray",),
}
MAY_NOT = {"solver": {"ray", "torch"}, "datasets": {"ray", "torch"}}
# The engine runs without Ray; these files are what Ray sees of it.
ACTORS_WITH_RAY = {"crew.py", "pool.py", "worker.py", "pulse.py", "drains.py"}


def files(package):
    """Python files of a top-level folder; the links inside flexray/ are folders of their own."""
    for path in sorted((ROOT / package).rglob("*.py")):
        inside = path.relative_to(ROOT / package)
        if package != "flexray" or inside.parts[0] not in PACKAGES:
            yield path


def imports(path, package):
    """Absolute names of all modules that a file imports anywhere, with the line."""
    module = path.relative_to(ROOT).with_suffix("").parts
    if package != "flexray":
        module = ("flexray", *module)
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = ".".join(module[: -node.level]) if node.level else ""
            base = ".".join(filter(None, (above, node.module)))
            yield base, node.lineno
            # `from flexray import actors` imports flexray.actors
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)


def inside(name, prefixes):
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


CASES = [(package, path) for package in PACKAGES for path in files(package)]


def test_all_files_are_looked_at():
    looked_at = {path for _, path in CASES}
    assert {ROOT / "solver" / "plan.py", ROOT / "flexray" / "commands" / "doctor.py"} <= looked_at
    assert not any((ROOT / "flexray" / "solver") in path.parents for path in looked_at)


@pytest.mark.parametrize(
    ("package", "path"), CASES, ids=[str(path.relative_to(ROOT)) for _, path in CASES]
)
def test_imports(package, path):
    names = list(imports(path, package))
    of_flexray = [(name, line) for name, line in names if name.startswith("flexray.")]
    upward = [(name, line) for name, line in of_flexray if not inside(name, MAY[package])]
    assert not upward, f"{package}/ may import only {MAY[package]}"

    heavy = MAY_NOT.get(package, set())
    if package == "actors" and path.name not in ACTORS_WITH_RAY:
        heavy = {"ray"}
    assert not [(name, line) for name, line in names if inside(name, heavy)], f"without {heavy}"

    if package == "flexray":
        assert not [(name, line) for name, line in of_flexray if inside(name, ["flexray.jobs"])]

    # Hugging Face owns `datasets`; a bare `solver` works in the repository's root only.
    bare = [(name, line) for name, line in names if inside(name, ["datasets", "solver", "actors"])]
    assert not bare, "write flexray.datasets, flexray.solver, flexray.actors"


def loaded_by(program):
    command = f"import sys\n{program}\nprint(*sorted({{n.split('.')[0] for n in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


HEAVY = {"ray", "torch", "transformers", "matplotlib", "wandb", "numba", "pyarrow"}


def test_help_loads_nothing_heavy():
    program = (
        "from flexray.__main__ import main\n"
        "sys.argv = ['flexray', '--help']\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 0\n"
    )
    assert not loaded_by(program) & HEAVY


def test_the_planner_and_the_data_load_neither_ray_nor_torch():
    names = [
        ".".join(("flexray", *path.relative_to(ROOT).with_suffix("").parts))
        for package in ("solver", "datasets")
        for path in files(package)
    ]
    assert not loaded_by("\n".join(f"import {name}" for name in names)) & {"ray", "torch"}


def test_datasets_shadows_nobody():
    assert not (ROOT / "datasets" / "__init__.py").exists()
