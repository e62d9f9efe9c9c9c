# Everything here works on a machine that has only python3, make and a C compiler.
#   make demo    train the laboratory's faulty models and let tpwatch name the faults
#   make test    run the test suite
# Each makes its environment by itself, once. The first call downloads torch.

PYTHON ?= python3
# More arguments for pip (another index, a proxy), for the demo and for pytest.
PIP_ARGS ?=
DEMO_ARGS ?=
PYTEST_ARGS ?=

# The newest supported host. On Python 3.11 its wheel installs although it declares 3.12.
NEWEST_HOST := megatron-core==0.19.2

INPUTS := pyproject.toml setup.py constraints.txt Makefile $(wildcard tpwatch/fingerprint/_native*.[ch])

.PHONY: demo test test-newest-host test-te lint format bench clean

demo: .venv/.demo
	.venv/bin/tpwatch demo $(DEMO_ARGS)

test: .venv/.dev
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest $(PYTEST_ARGS)

# The adapter and the laboratory again, on the newest host, and what needs triton.
test-newest-host: .venv-mcore19/.dev
	OMP_NUM_THREADS=1 .venv-mcore19/bin/python -m pytest -m "(megatron or triton) and not te and not gpu" $(PYTEST_ARGS)

# The fault that lives in Transformer Engine's Python.
test-te: .venv-te/.dev
	OMP_NUM_THREADS=1 .venv-te/bin/python -m pytest -m te $(PYTEST_ARGS)

lint: .venv/.dev
	scripts/lint .venv/bin/python

format: .venv/.dev
	.venv/bin/python -m ruff check --fix .
	.venv/bin/python -m ruff format .

bench: .venv/.dev
	scripts/bench .venv/bin/python

clean:
	rm -rf .venv .venv-mcore19 .venv-te build dist .ci-results *.egg-info
	rm -rf .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	rm -f tpwatch/fingerprint/_native*.so
	find tpwatch tests scripts benchmarks -name __pycache__ -prune -exec rm -rf {} +

# --- environments --------------------------------------------------------------------------------

# $(call environment,DIRECTORY): an empty environment, or a word on what is missing.
define environment
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("tpwatch needs Python 3.10 or later; choose one with make PYTHON=...")'
	@$(PYTHON) -m venv $(1) || { echo "python3 cannot make environments (Debian and Ubuntu: install python3-venv)"; exit 1; }
endef

# torch first and pinned, so that nothing which follows swaps it for another build.
.venv/.demo: $(INPUTS)
	$(call environment,.venv)
	.venv/bin/python -m pip install $(PIP_ARGS) -c constraints.txt torch
	.venv/bin/python -m pip install $(PIP_ARGS) -c constraints.txt -e '.[lab]'
	@touch $@

.venv/.dev: .venv/.demo
	.venv/bin/python -m pip install $(PIP_ARGS) -c constraints.txt -e '.[lab,dev]'
	@touch $@

.venv-mcore19/.dev: $(INPUTS)
	$(call environment,.venv-mcore19)
	grep -v '^megatron-core==' constraints.txt > .venv-mcore19/constraints.txt
	.venv-mcore19/bin/python -m pip install $(PIP_ARGS) -c .venv-mcore19/constraints.txt torch
	.venv-mcore19/bin/python -m pip install $(PIP_ARGS) -c .venv-mcore19/constraints.txt \
	  --ignore-requires-python --only-binary=:all: $(NEWEST_HOST) -e '.[lab,triton,dev]'
	@touch $@

.venv-te/.dev: $(INPUTS)
	$(call environment,.venv-te)
	.venv-te/bin/python -m pip install $(PIP_ARGS) -c constraints.txt torch
	.venv-te/bin/python -m pip install $(PIP_ARGS) -c constraints.txt -e '.[lab-te,dev]'
	@touch $@
