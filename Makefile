# make train: from nothing to a trained model.  make test: the proof.  Both set up .venv themselves.

VENV := .venv
PYTHON := $(VENV)/bin/python
CONFIG ?= configs/digits_mlp.yaml
OUT ?= runs/$(basename $(notdir $(CONFIG)))-$(shell date +%Y%m%d-%H%M%S)
EXTRAS := dev

.PHONY: help train test lint
.DEFAULT_GOAL := help

help:  ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

train: $(VENV)/installed  ## train on emulated devices (CONFIG=configs/... OUT=runs/...)
	$(PYTHON) -m jaxdp.train --config $(CONFIG) --out $(OUT)

test: $(VENV)/installed  ## run the test suite
	$(PYTHON) -m pytest -n 2

lint: $(VENV)/installed  ## ruff and pyright
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright --pythonpath $(PYTHON)

# the newest interpreter that really runs: a pyenv shim may exist and refuse
$(VENV)/installed: pyproject.toml
	@set -e; \
	if [ ! -x $(PYTHON) ]; then \
	  for v in 3.13 3.12 3.11 3; do \
	    if python$$v -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; then \
	      echo "creating $(VENV) with $$(python$$v --version)"; python$$v -m venv $(VENV); break; \
	    fi; \
	  done; \
	fi; \
	if [ ! -x $(PYTHON) ]; then echo "no Python 3.11 to 3.13 with venv was found: install one (Debian: apt install python3 python3-venv)" >&2; exit 2; fi
	@echo "installing jaxdp-trainer into $(VENV): a minute or two"
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check --editable '.[$(EXTRAS)]'
	@touch $@
