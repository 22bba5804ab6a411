# `make demo` serves the demo model, `make test` runs the tests, and `make help` lists all targets.
# Everything is installed inside the checkout (.uv, .venv, node_modules), without root, uv or node on the PATH.

BIN := .venv/bin
ARGS ?=
# Tests run in several processes. All tests of a file run in the same one, so that they share fixtures.
# Most tests wait for other processes, so six keep two cores busy; each takes seconds to find the tests. Those of several
# machines wait longer.
BY_FILE := --dist loadfile --no-loadscope-reorder
# Tests that start no processes. tests/process_marks.py marks the others.
WITHOUT_PROCESSES := not conformance and not faults and not processes
# Tests of which `make test` runs only some cases.
THOROUGH := $(patsubst %,tests/end_to_end/test_%.py,equality equality_of_ranks scheduling scheduling_caches scheduling_of_ranks grammars)
FAST := --hypothesis-profile fast -n 3 $(BY_FILE)
# Tests start hundreds of processes. Without bytecode files, each would compile all its imports again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-machines test-fast test-oldest check check-page english conformance architectures clients faults bench protos docs format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# One stamp file each, so that a second `make` starts at once.
NATIVE := $(wildcard $(addprefix packages/mlx-cpu-kernels/src/mlx_cpu_kernels/native/,*.cpp *.h *.mk))

.venv/.ready-run: pyproject.toml uv.lock scripts/setup
	@scripts/setup --later
	@touch $@

.venv/.ready-dev: pyproject.toml uv.lock scripts/setup $(NATIVE)
	@scripts/setup --dev
	@touch $@ .venv/.ready-run

setup: .venv/.ready-dev ## install .venv with everything for tests and checks

demo: .venv/.ready-run ## install, and serve the demo model over two stages (ARGS="--port 8200")
	@$(BIN)/mlx-ring serve demo --stages 2 $(ARGS)

# Compiles changed test files and fills Hypothesis's caches once, before several processes would each do so: all of it
# takes half a minute.
.venv/.compiled-tests: .venv/.ready-dev $(shell find tests packages/*/tests -name '*.py')
	@$(BIN)/pytest --collect-only -qq $(if $(filter .venv/.ready-dev,$?),,$(filter %.py,$?)) >/dev/null 2>&1 || true
	@touch $@

test: .venv/.compiled-tests ## install, and run the tests (ARGS="-k scheduler"; ARGS="-n 0" for one process)
	$(BIN)/pytest -m "not conformance and not faults and not machines" -n 6 $(BY_FILE) $(ARGS)
	@echo "Not included: most tests of several machines (make test-machines), most faults (make faults), and conformance"
	@echo "tests of every architecture and client (make conformance)."

test-machines: .venv/.compiled-tests ## test clusters of several machines, made of network namespaces, ssh and MPI (Linux, as root)
	$(BIN)/pytest -m "machines and not faults" -n 8 $(BY_FILE) $(ARGS) tests/end_to_end

test-fast: .venv/.compiled-tests ## run the quick tests: no processes, no long computation
	$(BIN)/pytest -m "$(WITHOUT_PROCESSES) and not slow" $(FAST) $(ARGS)

.venv-oldest/.ready: .venv/.ready-dev scripts/setup_oldest
	@scripts/setup_oldest
	@touch $@

test-oldest: .venv-oldest/.ready ## run all that start no processes on the lowest supported Python that this system's distribution ships
	.venv-oldest/bin/pytest -m "$(WITHOUT_PROCESSES)" $(FAST) $(ARGS)

check: .venv/.ready-dev ## check lint, format, types, import contracts and generated files
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/lint-imports --no-logo
	$(BIN)/python scripts/generate_protos.py --check
	$(BIN)/python scripts/generate_tables.py --check
	$(BIN)/python scripts/generate_dashboard.py --check
	$(BIN)/python scripts/generate_page_types.py --check
	$(BIN)/python scripts/check_english.py --tests
	@$(MAKE) --no-print-directory check-page

node_modules/.ready: package.json package-lock.json scripts/npm | .venv/.ready-dev
	@scripts/npm ci --silent
	@touch $@

check-page: node_modules/.ready ## check lint, format and types of the page's modules and styles
	@scripts/npm run --silent check

english: .venv/.ready-dev ## check the English of docs, docstrings, messages and names (ARGS="--summary src/mlx_ring/api")
	$(BIN)/python scripts/check_english.py $(ARGS)

conformance: architectures clients ## test every architecture and every client

architectures: .venv/.ready-dev ## compare every architecture, split and whole; write docs/architectures.md
	$(BIN)/pytest -m conformance --ignore tests/clients --write-table $(ARGS)
	$(BIN)/pytest $(THOROUGH) --thorough
	$(BIN)/pytest -m "thorough and not faults" --thorough

clients: .venv/.ready-dev ## test real clients, each in its own environment; write docs/clients.md (ARGS="-k litellm")
	$(BIN)/pytest tests/clients -m conformance --write-table $(ARGS)

faults: .venv/.ready-dev ## disturb answers by faults of real workers, machines and links (20 minutes at most)
	$(BIN)/pytest -m faults tests/faults tests/end_to_end $(ARGS)

bench: .venv/.ready-dev ## compare with mlx-lm on this machine
	$(BIN)/python bench/compare.py $(ARGS)

protos: .venv/.ready-dev ## generate Python code from the protos
	$(BIN)/python scripts/generate_protos.py

docs: .venv/.ready-dev ## generate the tables of settings, strategies and models, the Grafana dashboard and the page's types
	$(BIN)/python scripts/generate_tables.py
	$(BIN)/python scripts/generate_dashboard.py
	$(BIN)/python scripts/generate_page_types.py

format: .venv/.ready-dev node_modules/.ready ## format, and apply ruff's fixes
	$(BIN)/ruff format
	$(BIN)/ruff check --fix
	@scripts/npm run --silent format

clean: ## remove installed and built files
	rm -rf .uv .venv node_modules .venv-oldest .clients .debian dist build logs .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests bench scripts packages -name __pycache__ -type d -prune -exec rm -rf {} +
