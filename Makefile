# The first call of any target sets up $(VENV); nothing is installed outside it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SET_UP := $(VENV)/.set-up

.PHONY: help demo test check format wheel bench chaos simulate model clean

help: # List the targets.
	@sed -n 's/^\([a-z]*\):[^#]*# /make \1\t/p' Makefile | expand -t 16
	@echo "More checks and benchmarks: $(BIN)/python -m tests, $(BIN)/python -m benchmarks"

demo: $(SET_UP) # Start a server and a worker, and show a dozen requests.
	@$(BIN)/promptq demo

test: $(SET_UP) # Run the tests; ARGS=--whole runs all cases, ARGS="-n 0" uses one process.
	@$(BIN)/python -m pytest $(ARGS)

check: $(SET_UP) # Run ruff, mypy and import-linter.
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

format: $(SET_UP) # Format the code.
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

# auditwheel says for which systems the native code is; torch brings the OpenMP runtime.
DIST := dist
wheel: $(SET_UP) # Build the wheel in dist/, or in DIST=FOLDER.
	@rm -rf $(DIST)
	@$(BIN)/python -m build --outdir $(DIST)
	@for made in $(DIST)/*-linux_*.whl; do test ! -e "$$made" || \
		{ PATH="$(BIN):$$PATH" $(BIN)/auditwheel repair --exclude libgomp.so.1 --wheel-dir $(DIST) "$$made" && \
		rm "$$made"; }; done

bench: $(SET_UP) # Measure side by side with other engines; ARGS="--quick" for a first look.
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[bench]'
	@$(BIN)/python -m benchmarks table $(ARGS)

simulate: $(SET_UP) # Run workers and clients in worlds from seeds; ARGS="--seeds 1000 --seed 7".
	@$(BIN)/python -m tests simulate $(ARGS)

chaos: $(SET_UP) # Kill and freeze real processes, then audit all streams; ARGS="--seconds 3600 --seed 7".
	@$(BIN)/python -m tests chaos $(ARGS)

model: $(SET_UP) # Train the shipped model, then its draft head.
	@$(BIN)/python -m training.train
	@$(BIN)/python -m training.draft_head

clean: # Remove everything that was built, installed or cached here.
	rm -rf $(VENV) dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .cache

$(SET_UP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "promptq needs Python 3.11 or later; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.12"; exit 1; }
	@echo "Setting up $(VENV), once. Stage 1 of 3: an empty environment"
	@$(PYTHON) -m venv $(VENV)
	@echo "Stage 2 of 3: packages, 3 GB to download, 6 GB once installed; 2.7 GB if PyTorch is only for CPUs"
	@# At a terminal pip shows each package with its size and a bar; else only what goes wrong.
	@quiet=--quiet; test ! -t 1 || quiet=; \
		$(BIN)/python -m pip install $$quiet --constraint constraints.txt --editable '.[dev]'
	@echo "Stage 3 of 3: done, $$(du -sh $(VENV) | cut -f1) in $(VENV)"
	@touch $@
