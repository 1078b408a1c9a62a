PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help install demo test test-integration test-slow test-kernels-sanitized faults fuzz lint format bench bench-record results timm-suite docs docs-serve \
	dist-test test-lowest clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

install: $(STAMP)  ## set up .venv with the pinned dependencies (PYTHON=python3.12 to choose another interpreter)

$(STAMP): pyproject.toml constraints.txt hatch_build.py $(wildcard src/inlinevit/kernels/native/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check "pip>=25.1"  # for --group
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[all]" --group dev
	@touch $@

demo: install  ## train softmax, linear and InLine attention side by side, minutes on a CPU; writes runs/demo/report.html
	$(BIN)/inlinevit demo $(ARGS)

# One torch thread a worker: the workers are the parallelism.
test: install  ## run the fast tests (ARGS="-k swin" goes to pytest)
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto --dist worksteal $(ARGS)

test-integration: install  ## run the tests that start processes or a browser, train, compile or export
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto --dist worksteal -m "integration and not slow" $(ARGS)

test-slow: install  ## run the slow tests
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto --dist worksteal -m slow $(ARGS)

# Python itself is not instrumented: the sanitizer's runtime has to be loaded first, with the C++ library whose exceptions
# it intercepts, and what others leak is not reported. The AVX-512 variants are compiled to AVX2 instructions.
SANITIZED := $(CURDIR)/.cache/libinlinevit_kernels_sanitized.so
test-kernels-sanitized: install  ## run the kernels' tests with AddressSanitizer and UndefinedBehaviorSanitizer
	mkdir -p $(dir $(SANITIZED))
	$(BIN)/python src/inlinevit/kernels/build.py --sanitize --emulate --output $(SANITIZED)
	for variant in avx512_vnni avx512 avx2 generic; do \
		LD_PRELOAD=$$($(CXX) -print-file-name=libasan.so):$$($(CXX) -print-file-name=libstdc++.so) \
		ASAN_OPTIONS=detect_leaks=0 OMP_NUM_THREADS=2 \
		INLINEVIT_KERNELS_LIBRARY=$(SANITIZED) INLINEVIT_KERNELS=$$variant \
		$(BIN)/python -m pytest tests/kernels/test_attention.py tests/kernels/test_block.py \
		tests/kernels/test_patches.py tests/kernels/test_stream.py $(ARGS) || exit 1; \
	done

faults: install  ## kill, starve, damage and disturb training runs, and print a table; 20 minutes (docs/reliability.md)
	OMP_NUM_THREADS=1 $(BIN)/python tools/faults.py $(ARGS)

fuzz: install  ## give 10,000 broken inputs to each reader of files, and print a table (docs/reliability.md)
	OMP_NUM_THREADS=1 $(BIN)/python tools/fuzz.py $(ARGS)

lint: install  ## ruff check, ruff format --check, mypy, import-linter
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install  ## fix and format in place
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

timm-suite: install  ## run timm's own model tests on our models (fetches timm's source archive once)
	$(BIN)/python tools/timm_suite.py $(ARGS)

bench: install  ## rewrite tables and drawings of docs/performance.md from the records in docs/performance/
	$(BIN)/python tools/performance_page.py

bench-record: install  ## measure what docs/performance/ lacks; an hour (ARGS="window --again" measures that one again)
	$(BIN)/python tools/record_performance.py $(ARGS)

results: install  ## rewrite tables of docs/studies.md and choosing_attention.md (ARGS=runs/reproduce/results.json: a new record)
	$(BIN)/python tools/reproduce_page.py $(ARGS)

docs: install  ## build the documentation site into build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs-serve: install  ## show the documentation site on this machine, and update it when files change
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

dist-test: install  ## build wheel and sdist, install the wheel in an empty environment and try it; minutes
	$(BIN)/python tools/dist_test.py $(ARGS)

test-lowest: install  ## run a part of the tests with the oldest dependencies that are allowed; minutes
	$(BIN)/python tools/lowest_test.py $(ARGS)

clean:  ## remove caches and build output, keep .venv and runs
	rm -rf .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist
	find src tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
