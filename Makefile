# Everything from a bare machine with Python 3.11 or newer: `make demo`, `make test`. Each sets up what it needs, once.

PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && exit; done; echo python3)
BIN := .venv/bin
RECIPE ?= examples/smollm2-eagle3.yaml
ARGS ?=

.PHONY: help setup model data demo test test-packages test-fast test-peer lint docs api bench clean
.DEFAULT_GOAL := help

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## make .venv with torch, vLLM, draftsmith and its tools (FORCE=1: go through every step again)
	@$(PYTHON) tools/setup_environment.py $(if $(FORCE),--force)

model: setup ## make models/SmolLM2-135M-Instruct, the chat model of the demo and the tests
	@$(BIN)/python tools/make_smollm2.py

mimo: model ## make models/SmolLM2-135M-MiMo, the same model with a random native head (examples/mimo-mtp.yaml)
	@$(BIN)/python tools/make_mimo.py

data: setup ## make examples/data/smollm2, the demo's prompts and answers
	@$(BIN)/python tools/make_demo_data.py

demo: model data ## conversations → trained EAGLE-3 draft → served by vLLM, at most 15 minutes on 2 cores
	@$(BIN)/draftsmith run $(RECIPE) $(ARGS)

test-packages: setup ## what tests alone need of the system: iproute2, Chromium (Debian and Ubuntu, when root)
	@$(PYTHON) tools/setup_environment.py --tests

test: test-packages model data ## all tests, the end-to-end ones with a real vLLM among them
	@$(BIN)/python tools/run_tests.py $(ARGS)

test-fast: data ## the tests that need neither the model nor vLLM and take under ten seconds each
	@$(BIN)/python tools/run_tests.py --fast $(ARGS)

test-peer: setup ## checkpoints exchanged with the peer library, in an environment of its own, .venv-peer
	@$(BIN)/python tools/run_peer_tests.py $(ARGS)

lint: setup ## ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

docs: setup ## write docs/reference/ anew from the source
	@$(BIN)/python tools/write_reference.py

api: setup ## write docs/plugins/public_api.txt anew: the list of what plugins may import, after a change that is meant
	@$(BIN)/python tools/public_api.py --write

bench: model ## measure a training step: one JSON line per case
	@$(BIN)/python benchmarks/train_step.py $(ARGS)

clean: ## remove everything that make made, the model and the runs among it
	rm -rf .venv .venv-peer build dist models runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
