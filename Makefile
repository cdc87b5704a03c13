# What a user runs. Each target makes .venv first where it is missing.
PYTHON ?= python3.11
VENV := .venv/bin
STAMP := .venv/.ready
# On GPUs: make setup LOCK=requirements-gpu.lock
LOCK ?= requirements-cpu.lock

.PHONY: setup demo test test-fast test-long lint up down

setup: $(STAMP)

# pyproject.toml names the vLLM plug-in, which only an installation makes visible to vLLM.
$(STAMP): $(LOCK) pyproject.toml infra/setup.sh
	bash infra/setup.sh $(PYTHON) $(LOCK)
	touch $(STAMP)

demo: setup
	$(VENV)/python -m flows.train --preset tiny --label demo

test: setup
	$(VENV)/python -m pytest -m "not long"

test-fast: setup
	$(VENV)/python -m pytest -m fast

test-long: setup
	$(VENV)/python -m pytest -m long

lint: setup
	$(VENV)/ruff check .
	$(VENV)/ruff format --check .
	$(VENV)/pyright

up: setup
	$(VENV)/python -m infra.local up

down: setup
	$(VENV)/python -m infra.local down
