# `make demo` and `make test` need only Python >= 3.11 with venv, and a network the first time.

PYTHON ?= $(shell python3.11 -c 'import sys; print(sys.executable)' 2>/dev/null || echo python3)
# For pip, for example: make demo PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu"
PIP_FLAGS ?=
PYTEST_ARGS ?=
# Processes that run tests, each with engines of its own; two wait so often that they leave a seventh of two cores idle.
# With 0, pytest runs them itself, as --pdb needs.
TEST_WORKERS ?= 3
WORKERS := -n $(TEST_WORKERS) --dist loadgroup

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Present while an installation runs: what an interrupted one leaves cannot be trusted.
INSTALLING := $(VENV)/.installing
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
TORCH := $(shell grep '^torch==' requirements/cpu.lock)
PIP := $(BIN)/python -m pip --disable-pip-version-check

TINY := build/tiny/qwen2_5_omni
TINY_SOURCES := $(wildcard vllm_omni/testing/*.py)

# No network, the small machine's settings of vLLM's CPU backend, and bytecode, which every engine's process reads.
RUN_ENV := PYTHONDONTWRITEBYTECODE= HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_LOGGING_LEVEL=WARNING \
	VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

# Optional: what cannot be compiled here is left out, and torch does its work.
NATIVE := vllm_omni/ops/_native
NATIVE_FLAGS := -std=c++17 -O2 -shared -fPIC -fvisibility=hidden -Wall -Wextra
NATIVE_SOURCES := csrc/api/block_copy.cpp csrc/kernels/block_copy.cpp
NATIVE_HEADERS := csrc/api/block_copy.h csrc/kernels/block_copy.h
HAS_CXX := $(shell command -v $(CXX))

.PHONY: help demo test test-long check format fuzz native clean .venv
.DELETE_ON_ERROR:

help:
	@echo "make demo    set up .venv, build a tiny checkpoint, answer in text and speech"
	@echo "make test    set up .venv, run the tests (PYTEST_ARGS=..., TEST_WORKERS=3)"
	@echo "make test-long  what make test leaves out: long tests, and random tests at full size"
	@echo "make check   ruff, ruff format --check, mypy, the structure (tools/measure.py)"
	@echo "make format  mend what ruff can mend"
	@echo "make native  compile csrc with g++ into vllm_omni/ops/_native"
	@echo "make fuzz    random tests, FUZZ times their full size (default 50; FUZZ_FIRST_SEED for other cases)"
	@echo "make clean   remove .venv, build and caches"

.venv: $(STAMP)

$(STAMP): requirements/cpu.lock requirements/fix_cpu_env.py pyproject.toml
	@$(PYTHON) -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "error: $(PYTHON) is not Python >= 3.11 with the venv module."; \
		echo "       Install it (on Debian: apt-get install python3 python3-venv), or name another: make PYTHON=..." ; exit 1; }
	@if [ -e $(INSTALLING) ]; then echo "An earlier installation did not finish: starting afresh."; rm -rf $(VENV); fi
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@rm -f $@ && touch $(INSTALLING)
	@echo "Installing the environment of requirements/cpu.lock into $(VENV) (2.5 GB, a few minutes)."
	@# torch first, alone: its CPU build is the one thing that PyPI does not have.
	@$(PIP) install -qq --no-deps $(PIP_FLAGS) '$(TORCH)' 2>$(VENV)/pip.log || { \
		echo "pip does not find $(TORCH) where it looks; trying $(TORCH_CPU_INDEX)"; \
		$(PIP) install -qq --no-deps $(PIP_FLAGS) --extra-index-url $(TORCH_CPU_INDEX) '$(TORCH)'; } || { \
		echo "error: $(TORCH) could not be installed. What the first attempt said is in $(VENV)/pip.log."; \
		echo "       It is on PyTorch's public CPU index. If this machine reaches a mirror of that, name it and try again:"; \
		echo "       make $(or $(MAKECMDGOALS),.venv) PIP_FLAGS='--extra-index-url URL'"; exit 1; }
	@# vllm-omni is another project, with a package and a command of the same names.
	@# Two at a time: to unpack them keeps a core busy. Python compiles what it imports when it does.
	@grep -v '^#' requirements/cpu.lock | xargs -n 60 -P 2 $(PIP) install -qq --no-deps --no-compile $(PIP_FLAGS) \
		&& $(PIP) uninstall -qq -y vllm-omni \
		&& $(PIP) install -qq --no-deps --no-build-isolation -e . \
		&& $(BIN)/python requirements/fix_cpu_env.py || { \
		echo "error: the installation failed; the reason stands above. To try again: make $(or $(MAKECMDGOALS),.venv)"; exit 1; }
	@rm -f $(INSTALLING) && touch $@

# Built beside its place and moved there whole, so that an interrupted build leaves nothing that looks finished.
$(TINY)/config.json: $(TINY_SOURCES) | $(STAMP)
	@rm -rf $(TINY) $(TINY).part && mkdir -p $(dir $(TINY))
	@$(RUN_ENV) TRANSFORMERS_VERBOSITY=error $(BIN)/vllm-omni tiny qwen2_5_omni $(TINY).part
	@mv $(TINY).part $(TINY) && touch $@

# What the libraries warn of on any CPU is left out, so that the answer can be seen.
demo: $(STAMP) $(TINY)/config.json
	@$(RUN_ENV) VLLM_LOGGING_LEVEL=ERROR TRANSFORMERS_VERBOSITY=error TORCH_CPP_LOG_LEVEL=ERROR TORCH_LOGS=-all \
		PYTHONWARNINGS=ignore $(BIN)/python examples/offline.py --model $(TINY)

native: $(if $(HAS_CXX),$(NATIVE)/libvllm_omni_cpu.so)
	@$(if $(HAS_CXX),,echo "No $(CXX): csrc is not compiled.")

$(NATIVE)/libvllm_omni_cpu.so: $(NATIVE_SOURCES) $(NATIVE_HEADERS)
	@mkdir -p $(@D)
	$(CXX) $(NATIVE_FLAGS) -o $@ $(NATIVE_SOURCES)

test: $(STAMP) native
	@$(BIN)/python -m tests.machine
	$(RUN_ENV) $(BIN)/python -m pytest $(WORKERS) -m "not long" $(PYTEST_ARGS)

test-long: $(STAMP) native
	FUZZ=$(or $(FUZZ),1) $(RUN_ENV) $(BIN)/python -m pytest $(WORKERS) -m "long or fuzz" --durations 40 $(PYTEST_ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/measure.py --check

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# pytest answers 5 when no test carries the marker.
fuzz: $(STAMP)
	FUZZ=$(or $(FUZZ),50) $(RUN_ENV) $(BIN)/python -m pytest -m fuzz --timeout 0 $(PYTEST_ARGS) || [ $$? -eq 5 ]

clean:
	rm -rf $(VENV) $(NATIVE) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
