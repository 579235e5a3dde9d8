PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help install train test fuzz chaos lint clean

help: ## show this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

install: $(VENV)/installed ## make .venv with everything a CPU machine needs

$(VENV)/installed: pyproject.toml constraints-cpu.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else f"FlexRay needs Python 3.11 or newer and found {v.major}.{v.minor}: make PYTHON=python3.11 {sys.argv[1]}")' $(MAKECMDGOALS)
	@echo "Installing FlexRay into $(VENV) (a few minutes the first time)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints-cpu.txt --editable '.[dev]'
	@$(BIN)/python -c 'from flexray.solver.planner import warm; warm()' # compiles its kernels
	@touch $@

train: install ## train the built-in example: 4 CPU ranks, about 2 minutes
	@$(BIN)/flexray train

test: install ## run all tests, in two processes: many wait for other processes most of the time
	@$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

fuzz: install ## plan and verify 10,000 random problems: minutes
	@FLEXRAY_FUZZ=10000 $(BIN)/python -m pytest tests/solver/test_planner.py -k any_instance

chaos: install ## train 2,000 steps while 500 things go wrong: hours
	@FLEXRAY_CHAOS=500 $(BIN)/python -m pytest -s tests/chaos

lint: install ## formatting, lint and types
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

clean: ## remove what make and training left (runs are kept)
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build *.egg-info
