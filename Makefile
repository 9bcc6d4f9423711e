# Every target makes the environment that it needs in .venv; `make` alone lists them.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt
# Tests run on two processes; `make test JOBS=8` for more.
JOBS ?= 2

.DEFAULT_GOAL := help
.PHONY: help demo test slow torture lint format types docs check bench bench-engine interop clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## */\1|/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "make %-12s %s\n", $$1, $$2}'

# Two stamps: running the tests doesn't wait for the linters.
$(VENV)/.test: pyproject.toml constraints.txt
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(PIP) -e '.[test]'
	@touch $@

$(VENV)/.lint: $(VENV)/.test
	@$(PIP) -e '.[test,lint]'
	@touch $@

demo: $(VENV)/.test  ## train on 8 ranks, reshard to 32, train on with 2, in a minute
	@$(PY) examples/demo.py

test: $(VENV)/.test  ## the tests
	@$(PY) -m pytest -q -n $(JOBS) tests

slow: $(VENV)/.test  ## the slow tests: builds and installs
	@$(PY) -m pytest -q -n $(JOBS) -m slow tests

torture: $(VENV)/.test  ## all tests, slow ones too, with 2000 random cases each
	@$(PY) -m pytest -q -n $(JOBS) -m 'slow or not slow' --hypothesis-profile=torture tests

lint: $(VENV)/.lint  ## ruff: rules and formatting
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .

format: $(VENV)/.lint  ## mend what ruff can mend
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

types: $(VENV)/.lint  ## mypy --strict and pyright
	@$(PY) -m mypy
	@$(PY) -m pyright --pythonpath $(PY)

docs: $(VENV)/.test  ## check the examples and links in the docs
	@$(PY) docs/check.py

check: lint types docs test  ## everything that a change must pass

bench: $(VENV)/.test  ## measure speed and memory
	@$(PY) bench/run.py

bench-engine: $(VENV)/.test  ## measure the training engine beside DDP and FSDP2
	@$(PY) bench/engine.py

interop: $(VENV)/.test  ## resume in the real DeepSpeed what was converted here
	@$(PY) interop/deepspeed_resume.py

clean:  ## remove the environment and all that was built
	@rm -rf $(VENV) build dist out *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
