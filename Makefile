# make reproduce   show the fault of bitsandbytes #2080 and its repair, on this machine
# make test        lint, types and all tests
# make bench       step times of the repairs against native, as ratios in one run
# make gpu         on a machine with a CUDA device: the GPU tests and the benchmark there
# make clean       remove the environment that these set up
#
# Needs Python 3.10 or later. An active virtual environment is used as it is; else .venv is made.
# A torch that is already there stays, whatever its build (see setup).

PYTHON ?= python3
VENV ?= $(if $(VIRTUAL_ENV),$(VIRTUAL_ENV),.venv)
RUN := $(VENV)/bin/python
RANKS ?= 2
JSON ?=
export OMP_NUM_THREADS ?= 1

.PHONY: setup reproduce test lint bench gpu clean

reproduce: setup
	@$(RUN) -m refimpl reproduce --ranks $(RANKS) $(if $(JSON),--json $(JSON))

test: lint
	$(RUN) -m pytest

lint: setup
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

setup: $(VENV)/.refimpl-installed

# Where the interpreter already has a torch (a container, a hosted notebook), the new environment sees
# it, and where the environment has one, its exact build is what the installer is held to.
$(VENV)/.refimpl-installed: pyproject.toml constraints.txt
	test -x $(RUN) || $(PYTHON) -m venv $(VENV) \
	  $$($(PYTHON) -c "from importlib.util import find_spec as f; print('--system-site-packages' * bool(f('torch')))")
	{ grep -v '^torch==' constraints.txt; \
	  $(RUN) -c "from importlib.metadata import version as v; print('torch==' + v('torch'))" 2>/dev/null \
	  || grep '^torch==' constraints.txt; } > $(VENV)/refimpl-constraints.txt
	$(RUN) -m pip install --quiet --disable-pip-version-check -c $(VENV)/refimpl-constraints.txt -e '.[test]'
	touch $@

bench: setup
	@$(RUN) -m refimpl bench --ranks $(RANKS) $(if $(JSON),--json $(JSON))

gpu: setup
	$(RUN) -m pytest tests/gpu -q
	$(RUN) -m refimpl bench --played --device cuda $(if $(JSON),--json $(JSON))

clean:
	rm -rf .venv
