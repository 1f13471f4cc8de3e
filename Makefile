# SPDX-License-Identifier: Apache-2.0
# make demo            a real model answers through a prefill and a decode server
# make demo KEEP=1     ... and the servers stay up until Ctrl-C
# make test            everything, with real vLLM servers (minutes)
# make test-fast       without servers
# make test-versions   a smaller set with servers under each vLLM of vllm_datadist/versions.py, each in a venv of its own
# make nightly         the long forms: 100,000 simulated schedules, soaks, fuzzing (an hour)
# make bench           throughput and latency of the transfers; BENCH_ARGS=--help
# make lint            ruff and mypy
# make docs            docs/api, from the docstrings
PYTHON ?= python3
VENV_PYTHON := .venv/bin/python
DEMO_ARGS ?=
TEST_ARGS ?=
BENCH_ARGS ?=
# make test-versions VERSIONS="0.30.0 0.31.0"
VERSIONS ?=
# On two processors. All tests wait now and then, the fast ones for a moment. Servers take all processors for themselves.
TEST_JOBS ?= 3
FAST_JOBS ?= 4

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-fast test-versions nightly bench lint docs clean

help:
	@sed -n '2,10s/^# //p' Makefile

# bootstrap.py knows itself whether there is anything to do.
venv:
	@$(PYTHON) tools/bootstrap.py

demo: venv
	@$(VENV_PYTHON) -m examples.vllm_pd.demo $(if $(filter-out 0,$(KEEP)),--keep) $(DEMO_ARGS)

# The many processes of the tests compile a module once, not each for itself: empty means that byte code is written.
test test-fast: export PYTHONDONTWRITEBYTECODE :=

# Both parts run, whatever the first one finds. pytest ends with 5 where TEST_ARGS leave it nothing to do.
test: venv
	@$(VENV_PYTHON) -m pytest -m "not servers" -n $(TEST_JOBS) --dist loadscope $(TEST_ARGS); without=$$?; \
	$(VENV_PYTHON) -m pytest -m "servers" $(TEST_ARGS); with=$$?; \
	echo "without servers: pytest ended with $$without; with servers: $$with"; \
	{ [ $$without = 0 ] || [ $$without = 5 ]; } && { [ $$with = 0 ] || [ $$with = 5 ]; } && [ $$without$$with != 55 ]

test-fast: venv
	@$(VENV_PYTHON) -m pytest -m "not servers and not slow" -n $(FAST_JOBS) --dist loadscope $(TEST_ARGS)

# Not part of `test`: the first time it installs 3.5 GB per version, in $DATADIST_VERSIONS_DIR or .versions/.
test-versions:
	@$(PYTHON) tools/versions.py $(VERSIONS)

# For hours when nobody waits: every part ends by itself, and says what it has run.
nightly: venv
	$(VENV_PYTHON) -m connector.tests.simulation --schedules 100000 --jobs $(TEST_JOBS)
	$(VENV_PYTHON) -m datadist_core.testing.soak --seconds 600
	$(VENV_PYTHON) -m integration_tests.soak --seconds 600
	DATADIST_EXTRAS=fuzz $(PYTHON) tools/bootstrap.py
	$(VENV_PYTHON) -m fuzz --seconds 600

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
