# SPDX-License-Identifier: Apache-2.0
# make demo            a real model answers through a prefill and a decode server
# make demo KEEP=1     ... and the servers stay up until Ctrl-C
# make test            everything, with real vLLM servers (minutes)
# make test-fast       without servers
# make bench           throughput and latency of the transfers; BENCH_ARGS=--help
# make lint            ruff and mypy
# make docs            docs/api, from the docstrings
PYTHON ?= python3
VENV_PYTHON := .venv/bin/python
DEMO_ARGS ?=
TEST_ARGS ?=
BENCH_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-fast bench lint docs clean

help:
	@sed -n '2,8s/^# //p' Makefile

# bootstrap.py knows itself whether there is anything to do.
venv:
	@$(PYTHON) tools/bootstrap.py

demo: venv
	@$(VENV_PYTHON) -m examples.vllm_pd.demo $(if $(filter-out 0,$(KEEP)),--keep) $(DEMO_ARGS)

test: venv
	$(VENV_PYTHON) -m pytest $(TEST_ARGS)

test-fast: venv
	$(VENV_PYTHON) -m pytest -m "not servers and not slow" $(TEST_ARGS)

bench: venv
	@$(VENV_PYTHON) -m datadist_core.bench $(BENCH_ARGS)

lint: venv
	$(VENV_PYTHON) -m ruff check
	$(VENV_PYTHON) -m ruff format --check
	$(VENV_PYTHON) -m mypy --strict datadist_core

docs: venv
	@$(VENV_PYTHON) tools/api_docs.py

clean:
	rm -rf .venv build dist logs .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
