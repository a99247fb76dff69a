# Start with `make once` and `make test`; `make help` lists the other targets.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
ARGS :=
VENV := .venv
ARM64 := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/benchd-arm64
BOARD := /
JETSON_INDEX := $(BENCHD_JETSON_INDEX)
PLATFORM := $(shell if grep -qsa tegra '$(BOARD)'/proc/{device-tree/compatible,sys/kernel/osrelease}; then echo jetson; \
	elif nvidia-smi >/dev/null 2>&1; then echo gpu; else echo cpu; fi)
# if this finds none, .ci/setup stops with the reason
OF_BOARD = $(or $(shell $(PYTHON) exporters/tegra.py constraints '$(BOARD)' 2>/dev/null),constraints-jetson62.txt)
CONSTRAINTS := $(if $(filter jetson,$(PLATFORM)),$(OF_BOARD),constraints.txt)
PYTHON_VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true)

BIN := $(VENV)/bin
# An install writes its stamp last, and the next install removes it first.
ONCE := $(VENV)/.installed-$(PLATFORM)-$(PYTHON_VERSION)
TEST := $(ONCE)-dev
# A version manager's shim may exist for a Python that it does not run: ask the manager for its path.
FIND_PYTHON = python=$$($(1) -c 'import sys; print(sys.executable)' 2>/dev/null \
	|| pyenv whence --path $(1) 2>/dev/null | tail -n 1 || true); python=$${python:-$(1)}
PACKAGES := daemon models kernels exporters dashboard

# Four, because tests often wait for what they start: three use 72 % of two cores.
# Without bytecode, each program that a test starts recompiles our sources: 0.2 s per command, 0.5 s per bench-once run.
PYTEST = OMP_WAIT_POLICY=passive PYTHONDONTWRITEBYTECODE= $(BIN)/pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder
# A test that hangs anywhere fails after this time with its stacks, and the others continue in a new process.
HANG = -o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true
FAST := tests/e2e/test_bench_once.py::test_a_sweep_probes_first_and_last_and_prints_its_records_alone \
	tests/daemon tests/kernels tests/test_layout.py tests/test_docs.py \
	$(addprefix --ignore=tests/,daemon/worker daemon/measuring/test_process.py daemon/measuring/test_turns.py \
	daemon/profiling/test_collecting.py kernels/test_compiler.py kernels/test_dispatch.py)

export PYTHON JETSON_INDEX BOARD

.ONESHELL:
.PHONY: help once test test-fast test-slow test-ptx test-index test-unit test-gpu test-arm64 test-tensorrt test-amqtt test-neurobench test-nir test-hub test-jetpack62 test-jetpack72 bench-kernels bench-models bench-collector bench-telemetry bench-pages bench-link bench-quarter bench-quarter-dry bench-gpu bench-cpu soak soak-aa soak-gate soak-cluster soak-why check types weights pictures wheel release bundle programs clean

help:  ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*  ## /\1\t/p' Makefile | expand -t 18
	@echo 'Settings: PYTHON VENV ARGS JETSON_INDEX ARM64, as in: make once PYTHON=python3.12 ARGS="--models vim_tiny"'

once: $(ONCE)  ## set up and measure this machine once; ARGS is passed to bench-once
	@$(BIN)/bench-once --preset quick --report $(ARGS)

test: $(TEST) programs  ## set up and run the whole test suite; ARGS is passed to pytest
	@$(PYTEST) $(HANG) $(ARGS)

test-fast: $(TEST) programs  ## run tests without a torch process, one shape per kernel and one bench-once run; 2 minutes
	@$(PYTEST) $(HANG) --one-each $(FAST) $(ARGS)

test-slow: $(TEST) programs  ## run the simulations and combinations that `make test` leaves out; ARGS is passed to pytest
	@$(BIN)/pytest -m slow $(ARGS)

test-ptx: $(TEST)  ## run the kernels' tests on their PTX for sm_75, 87, 90 and 110, without a GPU; an hour
	@$(BIN)/pytest -s -m 'slow or not slow' tests/ptx $(ARGS)

test-index: $(TEST)  ## install the dashboard and the measuring packages from the package index into fresh environments; 10 minutes, 6 GB
	@$(BIN)/pytest -m index $(ARGS)

test-unit: $(TEST) programs  ## as root, boot systemd and run the service's life cycle and docs/jetson.md in it; prints the figures
	@$(BIN)/pytest -s -m slow tests/e2e/test_unit.py tests/e2e/test_jetson_page.py $(ARGS)

test-gpu: $(TEST)  ## test all that runs on this machine's GPU; ends with a verdict; 10 to 30 minutes
	@$(BIN)/python -c 'import sys, torch; torch.cuda.is_available() or sys.exit("torch finds no CUDA device here")'
	$(PYTEST) --numprocesses auto --maxprocesses 4 tests/kernels tests/gpu $(ARGS)

test-tensorrt: $(TEST)  ## check our use of TensorRT against the bindings of 10.3, 10.16 and 11, without a GPU
	BENCHD_TENSORRT_WHEELS=$(VENV)/tensorrt-wheels $(BIN)/pytest tests/exporters/test_tensorrt_bindings.py $(ARGS)

test-amqtt: $(TEST)  ## test delivery to amqtt, a broker without MQTT 5, in a separate environment
	BENCHD_AMQTT=$(VENV)/amqtt $(BIN)/pytest tests/daemon/delivery/test_amqtt.py $(ARGS)

test-neurobench: $(TEST)  ## compare the metrics of spiking nets with NeuroBench's own package
	BENCHD_SPIKING=$(VENV)/spiking $(BIN)/pytest tests/daemon/worker/test_neurobench_parity.py $(ARGS)

test-nir: $(TEST)  ## compare snnTorch, SpikingJelly and Norse nets with the NIR files that they write
	BENCHD_SPIKING=$(VENV)/spiking $(BIN)/pytest tests/models/test_nir_parity.py $(ARGS)

test-hub: $(TEST)  ## test Hugging Face Hub nets and torchmetrics metrics, with their own packages
	BENCHD_HUB=$(VENV)/hub $(BIN)/pytest tests/models/test_hub_net.py tests/daemon/worker/test_torchmetrics.py $(ARGS)

bench-kernels: $(ONCE)  ## race the kernels against torch and installed peers; ARGS="--list" shows the ops
	@$(BIN)/python -m benchmarks.kernels $(ARGS)

bench-models: $(ONCE)  ## race the models' variants against each other and installed peers
	@$(BIN)/python -m benchmarks.models $(ARGS)

bench-quarter: $(TEST)  ## measure what matters on this machine's GPU in a quarter of an hour; goes on where it was cut
	@$(BIN)/python -m benchmarks.quarter $(ARGS)

bench-quarter-dry: $(TEST)  ## see that each stage of bench-quarter runs, on the CPU
	@$(BIN)/python -m benchmarks.quarter --device cpu --dry --output bench-out/quarter-dry $(ARGS)

bench-gpu: $(TEST)  ## measure everything on this machine's GPU, in stages, within three hours
	@$(BIN)/python -m benchmarks.quarter --minutes 180 --output bench-out/gpu $(ARGS)

bench-cpu: $(TEST)  ## measure everything on the CPU, in stages, within an hour
	@$(BIN)/python -m benchmarks.quarter --device cpu --minutes 60 --output bench-out/cpu $(ARGS)

soak: $(TEST) programs  ## kill the service, its broker and its collector for an hour; ARGS="--help" lists options
	@$(BIN)/python -m tests.soak.soak $(ARGS)

bench-collector: $(TEST) programs  ## time how fast collectors store a backlog, even if one is killed; ARGS="--help" lists options
	@$(BIN)/python -m tests.soak.collector $(ARGS)

bench-telemetry: $(TEST) programs  ## time a store with the telemetry of 10,000 devices; ARGS="--help" lists options
	@$(BIN)/python -m tests.soak.telemetry $(ARGS)

bench-pages: $(TEST) programs  ## time the pages and queries of 300 boards with 1,000,000 records; ARGS="--help" lists options
	@$(BIN)/python -m tests.soak.pages $(ARGS)

bench-link: $(TEST) programs  ## time what an idle MQTT client costs a timed section; ARGS="--help" lists options
	@$(BIN)/python -m tests.soak.link $(ARGS)

soak-cluster: $(TEST) programs  ## kill a node of a clustered broker amid 50,000 results; needs Debian's ejabberd
	@$(BIN)/python -m tests.soak.cluster $(ARGS)

soak-aa: $(ONCE)  ## compare cases with themselves for hours, resuming where it stopped; ARGS="--help" lists options
	@$(BIN)/python -m tests.soak.soak_aa $(ARGS)

soak-gate: $(ONCE)  ## run the gate of docs/ci.md with and without a planted slowdown, 40 times each; 1.5 hours, resuming where it stopped
	@$(BIN)/python -m tests.soak.soak_gate $(ARGS)

soak-why: $(ONCE)  ## ask benchd why for ten regressions between wheels of ONNX Runtime; half an hour, resuming where it stopped
	@$(BIN)/python -m tests.soak.why $(ARGS)

check: $(TEST) types  ## check lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p benchd -p benchmarks $(foreach soak,collector cluster link soak_gate telemetry pages why,-m tests.soak.$(soak))

types:  ## make the link tree benchd/ that the type checker reads
	@mkdir -p .typing/benchd
	@for folder in $(PACKAGES); do ln -sfn ../../$$folder .typing/benchd/$$folder; done

weights: $(TEST)  ## train the small nets that ship, into models/demo/; 15 minutes on two cores
	@OMP_WAIT_POLICY=passive $(BIN)/python -m benchd.models.demo.train

pictures: $(TEST) programs  ## draw docs/pictures from the records in results/ and a run of `benchd demo`
	$(BIN)/python .ci/pictures.py results/amd-epyc-2-threads/records.jsonl docs/pictures

wheel:  ## build the wheel into dist/; needs Python with pip, and no environment
	rm -rf build dist/benchd-*.whl
	$(PYTHON) -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

release: $(TEST)  ## build wheel, sdist, checksums and notes in dist/release, and prove them in fresh Python 3.10 and 3.13
	@$(call FIND_PYTHON,python3.10); oldest=$$python
	$(call FIND_PYTHON,python3.13)
	$(BIN)/python .ci/release.py "$$oldest" "$$python"

bundle:  ## collect everything for a Jetson without a network in dist/bundle-TARGET; TARGET=jetpack62 or jetpack72
	@$(call FIND_PYTHON,$(if $(filter jetpack72,$(TARGET)),python3.12,python3.10))
	"$$python" -c '' 2>/dev/null || python=$(PYTHON)  # which is told what it lacks
	"$$python" .ci/bundle.py "$(TARGET)"

test-arm64:  ## set up, measure and test in an emulated 64-bit Arm Debian, as root, kept in ARM64=FOLDER; 1 to 4 hours, 4 GB
	@.ci/arm64 "$(ARM64)" $(ARGS)

test-jetpack62:  ## run the test suite with the versions of JetPack 6.2, on x86-64
	@$(call FIND_PYTHON,python3.10)
	$(MAKE) test PYTHON="$$python" VENV=.venv-jetpack62 PLATFORM=cpu CONSTRAINTS=constraints-jetson62.txt

test-jetpack72:  ## run the test suite with the versions of JetPack 7.2, on x86-64
	@$(call FIND_PYTHON,python3.12)
	$(MAKE) test PYTHON="$$python" VENV=.venv-jetpack72 PLATFORM=cpu CONSTRAINTS=constraints-jetson72.txt

programs: $(TEST)
	@.ci/programs $(BIN)/python

clean:  ## remove the output of builds and checks; keep the environments
	rm -rf build dist *.egg-info .typing .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(PACKAGES) benchmarks tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(ONCE): pyproject.toml $(CONSTRAINTS)
	@.ci/setup $(VENV) $(PLATFORM) $(PLATFORM),report $(CONSTRAINTS)
	@touch $@

$(TEST): pyproject.toml $(CONSTRAINTS)
	@.ci/setup $(VENV) $(PLATFORM) $(PLATFORM),report,dev $(CONSTRAINTS)
	@touch $(ONCE) $@
