# Everything here needs Python 3.11 or newer, pip and make. The first target to run makes .venv and installs into it.

PYTHON ?= python3
VENV := .venv
NEWEST := .venv-newest
BIN := $(VENV)/bin
# What is never imported need not be compiled to bytecode: that saves a good part of the installation's time.
INSTALL := $(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check -c constraints.txt
INPUTS := pyproject.toml constraints.txt CMakeLists.txt $(wildcard windlass/kernels/native/*)

# Where the environment tells Python to keep no bytecode (images often do), each of the many processes below would compile
# all that it imports: torch takes three times as long then.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo test check lint parity clients-newest bench bench-infinity chaos clean

help:
	@echo "make demo    train a small Llama on real text over two ranks; about five minutes with the installation"
	@echo "make test    every test that needs no GPU and no rival, without the long products"
	@echo "make check   style, types, import contract, unit tests: what a commit has to pass"
	@echo "make parity  the full products of the laws (long)"
	@echo "make clients-newest  tests of transformers, accelerate, peft, trl and lightning, of their newest versions"
	@echo "make bench   speed and memory beside plain PyTorch (long)"
	@echo "make chaos   kills ranks and launchers while they train and save, 50 times (some minutes)"
	@echo "make bench-infinity  half a billion parameters under a third of the memory that their states take (some minutes)"

demo: $(VENV)/.demo
	$(BIN)/windlass train --config examples/demo.json --model tiny --data stdlib --nproc 2 --steps 900 --prompt "def " --out runs/demo --overwrite

# Two at a time, each with a pool of ranks of its own: ranks wait for one another. Who has nothing left takes half of
# what the other has left. (tests/parity has nothing that is quick.)
test: $(VENV)/.test
	$(BIN)/python -m pytest --ignore=tests/parity -n 2 --dist worksteal --durations=20

check: lint
	$(BIN)/python -m pytest tests/unit -q -n 2 --dist worksteal

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

parity: $(VENV)/.test
	$(BIN)/python -m pytest -m slow; slow=$$?; \
	$(MAKE) clients-newest && exit $$slow

# The pins are what is tested at every change; this is what a user gets who installs clients today.
clients-newest: $(NEWEST)/.test
	$(NEWEST)/bin/python -m pip list --format=freeze | grep -iE '^(transformers|accelerate|peft|trl|lightning)=='
	$(NEWEST)/bin/python -m pytest tests/compat -n 2 --dist worksteal

$(NEWEST)/.test: $(INPUTS)
	test -x $(NEWEST)/bin/python || $(PYTHON) -m venv $(NEWEST)
	grep '^torch==' constraints.txt > $(NEWEST)/torch.txt
	$(NEWEST)/bin/python -m pip install -qq --disable-pip-version-check -c $(NEWEST)/torch.txt torch
	$(NEWEST)/bin/python -m pip install -qq --disable-pip-version-check -c $(NEWEST)/torch.txt --upgrade -e '.[test]'
	@touch $@

bench: $(VENV)/.test
	$(BIN)/python bench/train.py

bench-infinity: $(VENV)/.test
	$(BIN)/python bench/infinity.py

chaos: $(VENV)/.test
	$(BIN)/python bench/chaos.py

clean:
	rm -rf $(VENV) $(NEWEST)

# torch first and by its exact version: what needs torch then finds it, and no other build is fetched.
$(VENV)/.torch: $(INPUTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "windlass needs Python 3.11 or newer; name one: make PYTHON=python3.12 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo 'installing into $(VENV), once'
	$(INSTALL) torch
	@touch $@

$(VENV)/.demo $(VENV)/.test $(VENV)/.dev: $(VENV)/.%: $(VENV)/.torch
	$(INSTALL) -e '.[$*]'
	@touch $@
