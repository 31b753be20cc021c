# make reproduce     show the fault of bitsandbytes #2080 and its repair, on this machine
# make test          lint, types, all tests, and the notebooks against their stored outputs
# make docs          build the site into site/, with every link checked
# make links         list the links that leave the site anew
# make lab           open the notebooks in JupyterLab
# make notebooks     run the notebooks and store what they show
# make conformance   run the conformance matrix and store it for the site
# make bench         step times of the repairs against native, as ratios in one run
# make gpu           on a machine with a CUDA device: the GPU tests and the benchmark there
# make clean         remove the environment and the site
#
# Needs Python 3.10 or later. An active virtual environment is used as it is; else .venv is made.
# A torch that is already there stays, whatever its build (see below).

PYTHON ?= python3
VENV ?= $(if $(VIRTUAL_ENV),$(VIRTUAL_ENV),.venv)
RUN := $(VENV)/bin/python
RANKS ?= 2
JSON ?=
export OMP_NUM_THREADS ?= 1
export NO_MKDOCS_2_WARNING = 1

.PHONY: setup setup-all reproduce test lint docs links lab notebooks conformance bench gpu clean

reproduce: setup
	@$(RUN) -m refimpl reproduce --ranks $(RANKS) $(if $(JSON),--json $(JSON))

test: lint
	$(RUN) -m pytest
	$(RUN) -m pytest --nbval --nbval-current-env --nbval-cell-timeout 90 notebooks

lint: setup-all
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

docs: setup-all
	$(RUN) -m mkdocs build --strict

links: setup-all
	$(RUN) docs/hooks/external_links.py --write

lab: setup-all
	$(RUN) -m jupyter lab notebooks

notebooks: setup-all
	$(RUN) notebooks/execute.py

conformance: setup-all
	$(RUN) -m pytest tests/test_conformance.py --record

bench: setup
	@$(RUN) -m refimpl bench --ranks $(RANKS) $(if $(JSON),--json $(JSON))

gpu: setup-all
	$(RUN) -m pytest tests/gpu -q
	$(RUN) -m refimpl bench --played --device cuda $(if $(JSON),--json $(JSON))

setup: $(VENV)/.refimpl-installed

setup-all: $(VENV)/.refimpl-all-installed

# Where the interpreter already has a torch (a container, a hosted notebook), the new environment sees
# it, and where the environment has one, its exact build is what the installer is held to.
$(VENV)/refimpl-constraints.txt: constraints.txt
	test -x $(RUN) || $(PYTHON) -m venv $(VENV) \
	  $$($(PYTHON) -c "from importlib.util import find_spec as f; print('--system-site-packages' * bool(f('torch')))")
	{ grep -v '^torch==' constraints.txt; \
	  $(RUN) -c "from importlib.metadata import version as v; print('torch==' + v('torch'))" 2>/dev/null \
	  || grep '^torch==' constraints.txt; } > $@

INSTALL = $(RUN) -m pip install --quiet --disable-pip-version-check -c $(VENV)/refimpl-constraints.txt

$(VENV)/.refimpl-installed: pyproject.toml $(VENV)/refimpl-constraints.txt
	$(INSTALL) -e .
	touch $@

$(VENV)/.refimpl-all-installed: $(VENV)/.refimpl-installed
	$(INSTALL) -e '.[test,notebooks,docs]'
	touch $@

clean:
	rm -rf .venv site
