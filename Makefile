# Everything runs in .venv; `make setup` makes it from requirements.lock and does nothing when it is up to date.
PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN := .venv/bin
READY := .venv/.ready
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: setup quickstart test slow lint docs lock clean

setup: $(READY)

# torch comes first and by itself: which build fits (CPU, CUDA) is the package index's choice, not the lock's.
$(READY): requirements.lock pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint requirements.lock $(TORCH)
	$(BIN)/python -m pip install --quiet --no-deps --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

# Trains a small model to add two numbers, on the CPU; ARGS lays values over the config: ARGS="run.steps=20".
quickstart: setup
	$(BIN)/flashflow train configs/quickstart.yaml $(ARGS) --overwrite

# ARGS goes to pytest: ARGS="tests/config -x".
test: setup
	$(BIN)/python -m pytest $(ARGS)

# Whole training runs; SHARD=0/6 runs the first of six parts.
slow: setup
	$(BIN)/python -m pytest -m slow $(if $(SHARD),--shard $(SHARD)) $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Writes what is generated from the code.
docs: setup
	$(BIN)/flashflow schema --markdown > docs/config.md

# Pins what .venv holds now, but for torch and pip.
lock:
	$(BIN)/python -m pip freeze --all --exclude-editable | grep -v -i -e '^pip==' -e '^torch==' > requirements.lock

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
