# `make run` and `make test` each set up all that they need; stamps in .venv make the next time instant.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
VENV := .venv
BIN := $(VENV)/bin
# The first Python that is new enough and can make virtual environments; PYTHON=... names another.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
# The kind of machine decides the lock file; MACHINE=cpu keeps a machine with a GPU on its CPU.
MACHINE ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)
LOCK := requirements/$(MACHINE).lock
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input install --quiet
INSTALLED := $(VENV)/installed-$(MACHINE)
DEVELOPED := $(VENV)/developed-$(MACHINE)

# What the native module is built of; a change builds it anew.
NATIVE := $(wildcard native/*.cpp native/*.hpp native/CMakeLists.txt)
SANITIZERS := address,undefined thread

.PHONY: help run test test-gpu check sanitize doctor clean

help:
	@echo 'make run       install what is needed, start Harli with a demonstration, open the console it names'
	@echo 'make test      install what is needed, run every test that this machine can run'
	@echo 'make check     ruff, mypy and the import rules'
	@echo 'make sanitize  the native arena under the address, undefined-behaviour and thread sanitizers'
	@echo 'make test-gpu  the tests that need an NVIDIA GPU'
	@echo 'make doctor    what this machine has, what will be used, what is missing'
	@echo 'make clean     remove the virtual environment and caches (the data directory stays)'

run: $(INSTALLED)
	@exec $(BIN)/harli up --demo

test: $(DEVELOPED)
	@scripts/system-packages.sh
	@# A process that crashed is not replaced: its successor would be given what was done already, and wait for ever.
	$(BIN)/python -m pytest -n 2 --no-loadscope-reorder --max-worker-restart 0 -m 'not gpu' -ra --durations=15 $(PYTEST_ARGS)

test-gpu: $(DEVELOPED)
	$(BIN)/python -m pytest -m gpu -ra $(PYTEST_ARGS)

check: $(DEVELOPED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

sanitize: $(INSTALLED)
	@for sanitizer in $(SANITIZERS); do \
		echo "sanitizer: $$sanitizer"; \
		PATH="$(CURDIR)/$(BIN):$$PATH" cmake -S native -B build/$$sanitizer -G Ninja -DHARLI_SANITIZE=$$sanitizer >/dev/null; \
		PATH="$(CURDIR)/$(BIN):$$PATH" cmake --build build/$$sanitizer >/dev/null; \
		build/$$sanitizer/arena_test; \
	done

doctor: $(INSTALLED)
	@exec $(BIN)/harli doctor

clean:
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build *.egg-info
	cd native && rm -rf CMakeCache.txt CMakeFiles CMakeInit.txt .skbuild-info.json *.ninja .ninja* *.cmake *.a
	rm -f core/memory/*.so

$(VENV)/bin/python:
	@if [ -z '$(PYTHON)' ]; then \
		echo 'make: Python 3.11 or newer with the venv module is needed (Debian/Ubuntu: apt-get install python3 python3-venv),' \
			'or name one: make PYTHON=/path/to/python' >&2; exit 1; fi
	$(PYTHON) -m venv $(VENV)

$(INSTALLED): $(VENV)/bin/python $(LOCK) pyproject.toml $(NATIVE)
	@echo 'Installing the packages of $(LOCK) into $(VENV) (a few minutes the first time)'
	@rm -f $(VENV)/installed-* $(VENV)/developed-*
	@$(PIP) --no-deps -r $(LOCK)
	@# A CUDA build of torch links to libraries that only its own requirements name, each at one exact version.
	@$(PIP) "$$(grep '^torch==' $(LOCK))"
	@$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

$(DEVELOPED): $(INSTALLED) requirements/dev.lock
	@echo 'Installing the packages of requirements/dev.lock into $(VENV)'
	@$(PIP) --no-deps -r requirements/dev.lock
	@touch $@
