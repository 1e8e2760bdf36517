# `make demo` and `make test` do everything on a fresh machine with Python 3.11 or newer.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=

.PHONY: setup demo test test-verl test-verl-vllm env-verl lint soak clean

setup: $(STAMP)

# torch comes first and pinned: no other package's wish may replace it.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("robustrl needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt torch numpy
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[ucx,nixl,ray,gpu,report,dev]'
	@touch $@

# The main job: a real asynchronous RL run, five real faults, a report in report/.
demo: setup
	$(BIN)/robustrl demo $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

# Two workers: much of the time is spent waiting for processes that were killed or frozen on purpose.
test: lint
	$(BIN)/pytest -n 2 --dist worksteal $(ARGS)

# What robustrl attaches to has an environment of its own, kept under ~/.cache/robustrl (see ROBUSTRL_CACHE).
env-verl:
	@$(PYTHON) tests/frameworks/environments.py verl light

# Real verl on the CPU, roles killed on purpose.
test-verl:
	@environment=$$($(PYTHON) tests/frameworks/environments.py verl light) && \
	  $$environment/bin/python -m pytest tests/frameworks/verl -m "not slow" $(ARGS)

# The same with real vLLM replicas: another environment, and minutes.
test-verl-vllm:
	@environment=$$($(PYTHON) tests/frameworks/environments.py verl vllm) && \
	  $$environment/bin/python -m pytest tests/frameworks/verl -m slow $(ARGS)

# The long form of the tests that repeat themselves under random faults.
soak: setup
	ROBUSTRL_SOAK_PUBLICATIONS=500 $(BIN)/pytest tests/reconnect/test_weights_soak.py $(ARGS)

clean:
	rm -rf $(VENV) report .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
