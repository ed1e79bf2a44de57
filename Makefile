# Every target sets itself up: the virtual environment is made on first use.
# TORCH=2.15.0 (or another release from 2.11 on) works in an environment of its own, beside the usual one.
PYTHON ?= python3.11
TORCH ?= 2.13.0
VENV := .venv$(if $(filter-out 2.13.0,$(TORCH)),-$(TORCH))
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Every rank is a process: without bytecode each compiles our sources for itself.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test lint docs bench fuzz fuzz-files soak models clean
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1|/' | column -t -s '|'

# torch goes first and alone: the exact pin 2.13.0 finds the CPU build, a range would pull gigabytes of CUDA.
$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check torch==$(TORCH)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

demo: $(READY) ## train a small GPT on two local ranks; a table and an HTML report
	$(BIN)/crossfade demo

# Three workers keep two cores busy: tests on ranks wait a lot.
test: $(READY) ## all tests, on real rank processes (GPU tests are skipped without CUDA)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m 'not models and not timed'
	$(BIN)/python -m pytest tests/cost tests/execute tests/emulated tests/ranks -m 'timed and not models'

lint: $(READY) ## formatting, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

$(VENV)/.ready-for-docs: $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[docs]'
	touch $@

docs: $(VENV)/.ready-for-docs ## the documentation as a website, in site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: $(READY) ## step time against torch's DDP on this machine, as ratios
	$(BIN)/python -m benchmarks.step

fuzz: $(READY) fuzz-files ## the sampled-program tests, many more examples, and wrong files
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/properties --hypothesis-profile=fuzz -m 'models or not models' -n 2

fuzz-files: $(READY) ## 5,000 wrong files of every kind: refused by name, nothing runs (half an hour)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.files.fuzz --count 5000

soak: $(READY) ## 200 ranks killed, paused and delayed while they train and save (half an hour)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.soak

models: $(READY) ## real models in all combinations (an hour): simplified, trained, split over ranks; docs/models.md
	$(BIN)/python -m pytest tests -m models
	$(BIN)/python -m tests.models.table

clean: ## remove the virtual environments and caches
	rm -rf .venv .venv-* .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
