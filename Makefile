# Two commands are enough on a fresh Debian with Python >= 3.11 and make:
#   make demo   sets everything up and runs the main job
#   make test   sets everything up and passes the tests
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.stamp
# Bound thread pools: the machines this runs on may be small and shared.
export OMP_NUM_THREADS ?= 1
export GRPC_ENABLE_FORK_SUPPORT ?= 0

.PHONY: demo test lint protos bench setup clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	@echo "setting up $(VENV) (torch is large: this takes a few minutes the first time)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python >= 3.11 is needed; say PYTHON=python3.12 make ..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/rltune demo

test: $(STAMP) lint
	$(BIN)/python -m coverage erase
	$(BIN)/python -m pytest --cov --cov-report=term:skip-covered --cov-report=html tests

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Stubs are checked in, made with the oldest supported tools (docs/decisions/0001).
protos: $(STAMP)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I. --python_out=. \
		--grpc_python_out=. --mypy_out=quiet:. --mypy_grpc_out=quiet,only_async:. \
		protos/rltune.proto

bench: $(STAMP)
	for f in benchmarks/*.py; do $(BIN)/python $$f || exit 1; done

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis htmlcov .coverage*
