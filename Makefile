# make demo | test | lint | format | clean. The first run of either of the first two sets up .venv; later runs reuse it.

VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2
comma := ,

# The first Python that is new enough and can make a virtual environment with pip in it.
PYTHON ?= $(shell for python in python3 python3.11 python3.12 python3.13 python3.14; do \
	"$$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& { echo "$$python"; break; }; done)

# `call install,EXTRAS`: this project, editable, at the pinned versions of this Python.
define install
	@constraints=$$($(BIN)/python -c 'import sys; print("3.11" if sys.version_info < (3, 12) else "3.12")') && \
	echo "==> Installing jax-ssd with its extras $(1) (versions: constraints/python$$constraints.txt)" && \
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar on \
		-c constraints/python$$constraints.txt -e ".[$(1)]"
endef

.PHONY: demo test lint format clean

demo: $(VENV)/ready-demo
	$(BIN)/jax-ssd demo

# No test here needs a GPU, so JAX looks for none unless JAX_PLATFORMS says so. For a GPU's tests: pytest -m gpu.
test: lint
	JAX_PLATFORMS="$${JAX_PLATFORMS:-cpu}" $(BIN)/python -m pytest -n $(JOBS) -m "not gpu"

lint: $(VENV)/ready-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/ready-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .hypothesis demo_output
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/created:
	@test -n "$(PYTHON)" || { \
		echo "No Python 3.11 or newer with venv and ensurepip was found (Debian and Ubuntu: apt install python3-venv)."; \
		echo "Name one with: make PYTHON=/path/to/python3 ..."; exit 1; }
	@echo "==> Creating $(VENV) with $$("$(PYTHON)" --version)"
	@"$(PYTHON)" -m venv --clear $(VENV)
	@touch $@

$(VENV)/ready-demo: $(VENV)/created pyproject.toml $(wildcard constraints/*.txt)
	$(call install,flax$(comma)bench)
	@touch $@

$(VENV)/ready-test: $(VENV)/ready-demo
	$(call install,flax$(comma)bench$(comma)torch$(comma)test)
	@touch $@
