# PYTHON makes the environment, VENV says where it goes.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
RUN := $(VENV)/bin/python
# Where Python may not keep what it compiles, each command compiles two thousand modules again: five seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help train plan study bench gpu lab test test-clusters test-lab test-slow exports lint docs clean
.DELETE_ON_ERROR:

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*##/\1\t/p' Makefile | expand -t 12

train: runs/data/train.idx  ## train configs/tiny.py; ARGS="--config.run.steps=1000" overrides what the file says
	$(RUN) -m paxtrain.train --config=configs/tiny.py --cpu_devices=8 $(ARGS)

runs/data/train.idx: | $(VENV)/run.txt
	$(RUN) -m paxtrain.prepare --input=stdlib --out=runs/data

plan: | $(VENV)/run.txt  ## a dry run of the planner: 8.3B parameters on 128 A100s; ARGS="--explain" says why not others
	$(RUN) -m planner.plan --model=configs/gpt_8b.py --cluster=configs/clusters/a100_16x8_measured.json --out=runs/plan $(ARGS)

study: runs/data/train.idx  ## what compression does to training, as a page; ARGS="--seeds=3" shows the spread
	$(RUN) -m paxtrain.study --config=configs/study.py --out=runs/study $(ARGS)

bench: $(VENV)/run.txt  ## measure the training step and the planner
	$(RUN) -m experiments.bench.trainer
	$(RUN) -m experiments.bench.planner

# jax for CUDA takes gigabytes, so it is installed only where the driver shows a GPU.
GPU_ENVIRONMENT := $(VENV)/$(if $(wildcard /dev/nvidia0),gpu,run).txt

gpu: $(GPU_ENVIRONMENT)  ## measure all of it on this machine's GPUs (25 minutes), or see on CPUs that it runs (4 minutes)
	$(RUN) -m experiments.gpu $(ARGS)

lab: runs/data/train.idx | $(VENV)/run.txt  ## experiments on a cluster with slow links, made of this machine (root, an hour and a half; half an hour more: ARGS="--experiments=paper,sooner,adaptive")
	$(RUN) -m experiments.lab $(ARGS)

# If a worker dies, pytest-xdist may wait for ever for the one that replaces it (pytest-xdist#784), so none does.
PYTEST := $(RUN) -m pytest -n 2 --dist loadfile --max-worker-restart 0

test: $(VENV)/dev.txt  ## the quick tests; ARGS go to pytest
	$(PYTEST) --ignore=tests/cluster --ignore=tests/experiments $(ARGS)

# They have the machine to themselves: beside other tests they would run into limits of time.
test-clusters: $(VENV)/dev.txt  ## the tests on emulated clusters (root)
	$(RUN) -m pytest -m 'not slow' tests/cluster $(ARGS)

test-lab: $(VENV)/dev.txt  ## the tests of the laboratory itself (root)
	$(RUN) -m pytest -m 'not slow' tests/experiments $(ARGS)

test-slow: $(VENV)/dev.txt  ## the tests that take minutes, and further instances of quicker ones
	$(RUN) -m pytest -m slow $(ARGS)

exports: $(VENV)/dev.txt  ## plans for other trainers, read by their own parsers, in environments of gigabytes
	$(RUN) -m experiments.environment tests/planner/export/parsers/*.py
	$(RUN) -m pytest -m slow tests/planner/export $(ARGS)

lint: $(VENV)/dev.txt  ## rules, format and types
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy

docs: $(VENV)/docs.txt  ## the pages of docs/ as a site, runs/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build

clean:  ## remove the environment and the caches; runs/ stays
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -not -path './.*' -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("error: Python 3.11 or newer is needed, $(PYTHON) is %d.%d; make PYTHON=python3.12 would do" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	@echo "making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

# What is installed, as pip lists it, stands for the environment being up to date. Python compiles the few modules that
# are imported as it meets them; pip would take half a minute longer to compile all.
$(VENV)/run.txt: requirements.txt | $(VENV)/bin/python
$(VENV)/dev.txt: requirements-dev.txt requirements.txt | $(VENV)/bin/python
$(VENV)/gpu.txt: requirements-gpu.txt requirements.txt | $(VENV)/bin/python
$(VENV)/docs.txt: requirements-docs.txt | $(VENV)/bin/python
$(VENV)/run.txt $(VENV)/dev.txt $(VENV)/gpu.txt $(VENV)/docs.txt:
	@echo "installing $< into $(VENV) (a minute or two)"
	@$(RUN) -m pip install --quiet --disable-pip-version-check --no-compile --requirement $<
	@$(RUN) -m pip freeze --disable-pip-version-check > $@
