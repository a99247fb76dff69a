# The commands of a newcomer are `make once` and `make test`; `make help` lists the others.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
ARGS :=
VENV := .venv
JETSON_RELEASE := /etc/nv_tegra_release
JETSON_INDEX := $(BENCHD_JETSON_INDEX)
PLATFORM := $(shell if [ -e '$(JETSON_RELEASE)' ]; then echo jetson; \
	elif nvidia-smi >/dev/null 2>&1; then echo gpu; else echo cpu; fi)
CONSTRAINTS := $(if $(filter jetson,$(PLATFORM)),constraints-jetson62.txt,constraints.txt)
PYTHON_VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true)

BIN := $(VENV)/bin
# A stamp is the last thing an install writes, and the next install removes it first.
ONCE := $(VENV)/.installed-$(PLATFORM)-$(PYTHON_VERSION)
TEST := $(ONCE)-dev
# The shim of a version manager may exist for a Python that it does not run: ask the manager where it lies.
FIND_PYTHON_3_10 = python=$$(python3.10 -c 'import sys; print(sys.executable)' 2>/dev/null \
	|| pyenv whence --path python3.10 2>/dev/null | tail -n 1 || true)
PACKAGES := daemon models kernels exporters dashboard

PYTEST = OMP_WAIT_POLICY=passive $(BIN)/pytest --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
FAST := tests/e2e/test_bench_once.py::test_json_prints_the_records_and_nothing_else tests/daemon tests/kernels \
	tests/test_layout.py tests/test_docs.py $(addprefix --ignore=tests/,daemon/worker daemon/measuring/test_process.py \
	daemon/profiling/test_collecting.py kernels/test_compiler.py kernels/test_dispatch.py kernels/test_shipped.py)

export PYTHON JETSON_INDEX

.ONESHELL:
.PHONY: help once test test-fast test-slow test-index test-unit test-gpu test-tensorrt test-amqtt test-jetpack62 bench-kernels bench-models bench-collector bench-gpu bench-cpu soak soak-aa check types weights occupancy wheel bundle programs clean

help:  ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*  ## /\1\t/p' Makefile | expand -t 18
	@echo 'Settings: PYTHON VENV ARGS JETSON_INDEX, as in: make once PYTHON=python3.12 ARGS="--models vim_tiny"'

once: $(ONCE)  ## set up and measure this machine once; ARGS goes to bench-once
	@$(BIN)/bench-once --preset quick --report $(ARGS)

test: $(TEST) programs  ## set up and run the whole test suite; ARGS goes to pytest
	@$(PYTEST) $(ARGS)

test-fast: $(TEST) programs  ## what has no process with torch, a shape of each kernel and one run of bench-once; 2 minutes
	@$(PYTEST) --one-each $(FAST) $(ARGS)

test-slow: $(TEST) programs  ## the simulations that `make test` leaves out; ARGS goes to pytest
	@$(BIN)/pytest -m slow $(ARGS)

test-index: $(TEST)  ## install the dashboard from the package index into a fresh environment and use it without torch
	@$(BIN)/pytest -m index $(ARGS)

test-unit: $(TEST) programs  ## boot a systemd and put the service through its life there, as root; prints the figures
	@$(BIN)/pytest -s -m slow tests/e2e/test_unit.py $(ARGS)

test-gpu: $(TEST)  ## the kernels and the models on this machine's GPU; ARGS goes to pytest
	@$(BIN)/python -c 'import sys, torch; torch.cuda.is_available() or sys.exit("torch finds no CUDA device here")'
	$(BIN)/pytest tests/kernels tests/gpu $(ARGS)

test-tensorrt: $(TEST)  ## our use of TensorRT against the bindings of 10.3 and 11, without a GPU
	BENCHD_TENSORRT_WHEELS=$(VENV)/tensorrt-wheels $(BIN)/pytest tests/exporters/test_tensorrt_bindings.py $(ARGS)

test-amqtt: $(TEST)  ## delivery to amqtt, a broker without MQTT 5, in an environment of its own
	BENCHD_AMQTT=$(VENV)/amqtt $(BIN)/pytest tests/daemon/delivery/test_amqtt.py $(ARGS)

bench-kernels: $(ONCE)  ## race the kernels against torch and the peers installed here; ARGS="--list" shows the ops
	@$(BIN)/python -m benchmarks.kernels $(ARGS)

bench-models: $(ONCE)  ## race the variants of the models against each other and the peers installed here
	@$(BIN)/python -m benchmarks.models $(ARGS)

bench-gpu: $(TEST)  ## everything that can be measured on this machine's GPU, in stages, into results/
	@$(BIN)/python -m benchmarks.campaign --device cuda $(ARGS)

bench-cpu: $(TEST)  ## the same on the CPU
	@$(BIN)/python -m benchmarks.campaign --device cpu --minutes 60 $(ARGS)

soak: $(TEST) programs  ## kill and fill up the service's delivery for an hour; ARGS="--help" says more
	@$(BIN)/python -m tests.soak.soak $(ARGS)

bench-collector: $(TEST) programs  ## how fast collectors store a backlog, also with one killed; ARGS="--help" says more
	@$(BIN)/python -m tests.soak.collector $(ARGS)

soak-aa: $(ONCE)  ## compare cases with themselves for hours, goes on where it stopped; ARGS="--help" says more
	@$(BIN)/python -m tests.soak.soak_aa $(ARGS)

check: $(TEST) types  ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p benchd -p benchmarks -m tests.soak.collector

types:  ## the link tree benchd/ that the type checker reads
	@mkdir -p .typing/benchd
	@for folder in $(PACKAGES); do ln -sfn ../../$$folder .typing/benchd/$$folder; done

weights: $(TEST)  ## train the small nets that ship, into models/demo/: a quarter of an hour on two cores
	@OMP_WAIT_POLICY=passive $(BIN)/python -m benchd.models.demo.train

occupancy: $(TEST)  ## compile every Triton kernel for every GPU and rewrite docs/occupancy.md
	$(BIN)/python -m benchd.kernels.shipped docs/occupancy.md

wheel: $(TEST)  ## build the wheel into dist/
	rm -rf build dist/benchd-*.whl
	$(BIN)/python -m build --wheel --no-isolation

bundle: wheel  ## what a Jetson without a network needs, into dist/bundle-TARGET; TARGET=jetpack62
	@$(FIND_PYTHON_3_10)
	"$${python:-python3.10}" .ci/bundle.py "$(TARGET)" dist/benchd-*.whl

test-jetpack62:  ## the test suite with the versions of JetPack 6.2, on x86-64
	@$(FIND_PYTHON_3_10)
	$(MAKE) test PYTHON="$${python:-python3.10}" VENV=.venv-jetpack62 PLATFORM=cpu CONSTRAINTS=constraints-jetson62.txt

programs: $(TEST)
	@.ci/programs $(BIN)/python

clean:  ## remove what builds and checks leave; the environments stay
	rm -rf build dist *.egg-info .typing .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(PACKAGES) benchmarks tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(ONCE): pyproject.toml $(CONSTRAINTS)
	@.ci/setup $(VENV) $(PLATFORM) $(PLATFORM),report $(CONSTRAINTS)
	@touch $@

$(TEST): pyproject.toml $(CONSTRAINTS)
	@.ci/setup $(VENV) $(PLATFORM) $(PLATFORM),report,dev $(CONSTRAINTS)
	@touch $(ONCE) $@
