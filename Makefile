# Every target sets up what it needs: .venv, from requirements.lock, plus an editable install of this tree.
# It is done again when the lock or pyproject.toml changes. Another interpreter: make PYTHON=python3.13 test

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Workers of pytest. Each imports torch, so that more than 8 cost more than they bring.
WORKERS ?= auto
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests and drills start thousands of processes: none of them should compile what the one before did.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test lint format test-long test-peers explore drills drills-smoke kernels docs bench lock clean
.DELETE_ON_ERROR:

help:
	@echo "make demo       run the demonstration"
	@echo "make test       linters, types, import arrows, tests (not the long ones)"
	@echo "make lint       the first three of these"
	@echo "make format     let ruff mend what it can"
	@echo "make test-long  the long tests"
	@echo "make test-peers the tests against DeepSpeed, megatron-core, zarr and peft, in an environment of their own"
	@echo "make explore    every schedule of small clusters of the node cache, and every state a crash may leave; long"
	@echo "make drills     faults put into the real program, all of them, with a report in build/drills.html; up to an hour"
	@echo "make drills-smoke  a few of them"
	@echo "make kernels    build all kernels for gfx942 without a GPU, test them in Triton's interpreter"
	@echo "make docs       the documentation, into site/"
	@echo "make bench      the benchmarks"
	@echo "make lock       renew requirements.lock"
	@echo "make clean      remove .venv and everything that was made"

setup: $(READY)

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "ckptkit needs Python 3.11 or newer, and '$(PYTHON)' is not: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 2; }
	@[ -x $(BIN)/python ] || $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "'$(PYTHON)' cannot make virtual environments: it lacks venv or ensurepip." >&2; \
	  echo "Debian, Ubuntu: apt-get install python3-venv   or choose another: make PYTHON=... $(MAKECMDGOALS)" >&2; exit 2; }
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip
	$(BIN)/python -m pip install --quiet -r requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	@touch $@

demo: $(READY)
	$(BIN)/ckptkit demo

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: lint
	$(PYTEST) -m "not long and not peers"

# pytest says 5 when it has selected nothing, which is no failure here.
test-long: $(READY)
	$(PYTEST) -m long || [ $$? -eq 5 ]

# The judges (DeepSpeed, megatron-core, zarr, peft) stay out of the environment that everything else is tested in.
PEERS := .venv-peers

$(PEERS)/.ready: requirements-peers.lock requirements.lock pyproject.toml
	[ -x $(PEERS)/bin/python ] || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet -r requirements-peers.lock
	$(PEERS)/bin/python -m pip install --quiet --no-deps --editable .
	@touch $@

test-peers: $(PEERS)/.ready
	OMP_NUM_THREADS=1 $(PEERS)/bin/python -m pytest -m "peers and not long" tests

explore: $(READY)
	$(PYTEST) -s -m "long or not long" tests/cache/test_exploration.py tests/cache/test_traces.py tests/faults/test_crash_scenarios.py

drills: $(READY)
	mkdir -p build
	$(BIN)/ckptkit drill all --seed 1 --report build/drills.html

drills-smoke: $(READY)
	$(BIN)/ckptkit drill all --seed 1 --smoke

# Triton stays beside the environment, not in it: nothing else may come to depend on it.
# Where benchmarks/reshard.py writes some 30 GB; a folder on the disk to measure.
BENCH_DIR ?= build/bench
KERNELS := build/kernels

$(KERNELS)/.ready: requirements-kernels.lock | $(READY)
	rm -rf $(KERNELS)
	$(BIN)/python -m pip install --quiet --no-deps --target $(KERNELS) -r requirements-kernels.lock
	@touch $@

kernels: $(KERNELS)/.ready
	PYTHONPATH=$(KERNELS) $(BIN)/python -m ckptkit.kernels.aot --allow-missing
	PYTHONPATH=$(KERNELS) $(PYTEST) tests/kernels

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(READY)
	$(BIN)/python benchmarks/start.py
	$(BIN)/python benchmarks/plan_scale.py
	$(BIN)/python benchmarks/reshard.py $(BENCH_DIR)

# Resolves all versions afresh but keeps torch and transformers, whose formats the tests know by version.
lock:
	rm -rf build/lock && $(PYTHON) -m venv build/lock
	build/lock/bin/pip install --quiet $$(grep -E '^(torch|transformers)==' requirements.lock) ".[test,dev,docs]"
	grep '^#' requirements.lock > build/lock/new
	build/lock/bin/pip freeze --exclude ckptkit | sed -E 's/^(torch==[0-9.]+)[+].*/\1/' \
	  | grep -viE '^(nvidia|cuda|triton|pytorch-triton)' >> build/lock/new
	mv build/lock/new requirements.lock

clean:
	rm -rf $(VENV) $(PEERS) build dist site demo-out htmlcov .coverage .cache .hypothesis .grimp_cache \
	  .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find ckptkit formats cli tests -name __pycache__ -type d -prune -exec rm -rf {} +
