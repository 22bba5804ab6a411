# `make demo` serves the demo model from nothing; `make test` runs the tests. `make help` lists the rest.
# Everything is set up inside the checkout (.uv, .venv); no root, no uv on the PATH.

BIN := .venv/bin
ARGS ?=
# Tests run in several processes, a file's tests in one of them, so that what they set up serves all of them.
# More than four would fill a laptop's memory with servers.
SIDE_BY_SIDE := -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder
# Tests start hundreds of processes. Where nothing compiled may be kept, each would compile all that it imports again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test check conformance architectures clients bench protos docs format clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# A stamp each, so that a second `make` starts at once.
.venv/.ready-run: pyproject.toml uv.lock scripts/setup
	@scripts/setup
	@touch $@

.venv/.ready-dev: pyproject.toml uv.lock scripts/setup
	@scripts/setup --dev
	@touch $@ .venv/.ready-run

setup: .venv/.ready-dev ## set up .venv with all that the tests and checks need

demo: .venv/.ready-run ## set up from nothing, serve the demo model over two stages (ARGS="--port 8200")
	@$(BIN)/mlx-ring serve demo --stages 2 $(ARGS)

test: .venv/.ready-dev ## set up and run the tests (ARGS="-k scheduler", ARGS="-n 0" for one process)
	$(BIN)/pytest -m "not conformance" $(SIDE_BY_SIDE) $(ARGS)
	@echo "Not run here: the conformance runs over every architecture and every client (make conformance)."

check: .venv/.ready-dev ## lint, format, types, import contracts, generated code
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/lint-imports --no-logo
	$(BIN)/python scripts/generate_protos.py --check
	$(BIN)/python scripts/generate_settings_table.py --check
	$(BIN)/python scripts/generate_dashboard.py --check

conformance: architectures clients ## every architecture and every client

architectures: .venv/.ready-dev ## cut every architecture and compare with the whole; rewrites docs/architectures.md
	$(BIN)/pytest -m conformance --ignore tests/clients --write-table $(ARGS)
	$(BIN)/pytest tests/end_to_end/test_equality.py --thorough

clients: .venv/.ready-dev ## run real clients, each in an environment of its own; rewrites docs/clients.md (ARGS="-k litellm")
	$(BIN)/pytest tests/clients -m conformance --write-table $(ARGS)

bench: .venv/.ready-dev ## compare with mlx-lm on this machine, side by side
	$(BIN)/python bench/compare.py $(ARGS)

protos: .venv/.ready-dev ## generate the messages' code from the protos
	$(BIN)/python scripts/generate_protos.py

docs: .venv/.ready-dev ## write the table of settings and the Grafana dashboard
	$(BIN)/python scripts/generate_settings_table.py
	$(BIN)/python scripts/generate_dashboard.py

format: .venv/.ready-dev ## format, and mend what ruff can mend
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

clean: ## remove what was set up and built
	rm -rf .uv .venv .clients .debian dist build logs .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests bench scripts -name __pycache__ -type d -prune -exec rm -rf {} +
