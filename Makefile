# Everything here needs Python 3.11 or newer, pip and make. The first target to run makes .venv and installs into it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Modules that are never imported need no bytecode, which saves much of the installation time.
INSTALL := $(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check -c constraints.txt
# `make HASHED=1` installs exactly the files in requirements.lock, and pip checks the hash of each. CI does so. Without
# it a local build of torch, whose hash differs from the public one, can be used.
LOCKED := $(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check --require-hashes --no-deps -r requirements.lock
INPUTS := pyproject.toml constraints.txt requirements.lock CMakeLists.txt $(wildcard windlass/kernels/native/*)

# Each of the targets prints its output when it is done (make 3.81 of macOS: in between).
TWO_AT_A_TIME := $(MAKE) --no-print-directory -j2 $(if $(filter output-sync,$(.FEATURES)),--output-sync=target)

# If the environment disables bytecode (container images often do), each of the many processes below would compile all
# modules that it imports: importing torch then takes three times as long.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo test near check lint parity fuzz lock clients-newest clients-matrix clients-quick bench bench-infinity chaos clean

help:
	@echo "make demo    train a small Llama on real text over two ranks; five to fifteen minutes with the installation"
	@echo "make test    every test that needs no GPU and no rival library, without the full products"
	@echo "make near    the tests that changed files can reach (BASE=commit to compare with; default: where the branch left main)"
	@echo "make check   style, types, import contract, unit tests: required before a commit"
	@echo "make parity  the full products of the laws (long)"
	@echo "make fuzz    damaged and forged files for every reader, for an hour (WINDLASS_FUZZ_SECONDS=36000 for ten)"
	@echo "make clients-newest  tests of transformers, accelerate, peft, trl and lightning, of their newest versions"
	@echo "make clients-matrix  the same with transformers 4.57, 5.0, 5.8 and the newest (long); clients-5.8.1: one of them"
	@echo "make clients-quick   one test with the oldest and the newest version, for CI"
	@echo "make lock    rebuild requirements.lock from pyproject.toml and constraints.txt (needs uv)"
	@echo "make bench   speed and memory beside plain PyTorch (long)"
	@echo "make chaos   kill ranks and launchers while they train and save, 50 times (some minutes)"
	@echo "make bench-infinity  train half a billion parameters with a third of the memory of their states (some minutes)"

demo: $(VENV)/.demo
	$(BIN)/windlass train --config examples/demo.json --model tiny --data stdlib --nproc 2 --steps 900 --prompt "def " --out runs/demo --overwrite

# Two processes, each with its own pool of ranks, because ranks wait for one another. An idle process takes half of the
# other's remaining tests. (tests/parity has only slow tests.)
test: $(VENV)/.test
	$(BIN)/python -m pytest --ignore=tests/parity -n 2 --dist worksteal --durations=20

near: $(VENV)/.test
	$(BIN)/python tools/select_tests.py --base "$(BASE)" -- -n 2 --dist worksteal

check: lint
	$(BIN)/python -m pytest tests/unit -q -n 2 --dist worksteal

# The longest first, since two run at a time.
LINTERS := lint-types lint-scripts lint-imports lint-style
lint: $(VENV)/.dev
	@$(TWO_AT_A_TIME) $(LINTERS)

.PHONY: $(LINTERS)
$(LINTERS): $(VENV)/.dev

lint-types:
	$(BIN)/mypy

lint-scripts:
	cd bench && $(abspath $(BIN))/mypy *.py rig/*.py

lint-imports:
	$(BIN)/lint-imports

lint-style:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/prose.py

# A parameter of 2^31 elements needs most of the memory, so its tests run alone.
LARGE := tests/process/test_large_parameter.py
parity: $(VENV)/.test
	$(BIN)/python -m pytest -m slow -n 2 --dist worksteal --ignore=$(LARGE); slow=$$?; \
	$(BIN)/python -m pytest -m slow $(LARGE) && $(MAKE) clients-matrix && exit $$slow

# `make test` does the same for some seconds. A failing case is stored, and its seed is printed.
fuzz: export WINDLASS_FUZZ_SECONDS ?= 3600
fuzz: $(VENV)/.test
	$(BIN)/python -m pytest tests/fuzz -m "" -s

# The pinned versions are tested at every change. Each environment below extends .venv by the packages that another
# version of transformers needs, which install in seconds. The newest versions are those that a user who installs the
# clients today gets.
clients-newest clients-4.57.6 clients-5.0.0 clients-5.8.1: clients-%: .venv-clients/%/.test
	.venv-clients/$*/bin/python -m pip list --format=freeze | grep -iE '^(transformers|accelerate|peft|trl|lightning)=='
	.venv-clients/$*/bin/python -m pytest tests/compat tests/unit/attention -n 2 --dist worksteal

clients-matrix: clients-4.57.6 clients-5.0.0 clients-5.8.1 clients-newest

# The oldest and the newest version, on a few tests that each start one run: for CI.
OLDEST_AND_NEWEST := clients-quick-4.57.6 clients-quick-newest
clients-quick: $(VENV)/.test
	@$(TWO_AT_A_TIME) $(OLDEST_AND_NEWEST)

.PHONY: $(OLDEST_AND_NEWEST)
$(OLDEST_AND_NEWEST): clients-quick-%: .venv-clients/%/.test
	.venv-clients/$*/bin/python -m pytest -q -m slow tests/compat/test_installed_versions.py

# Newer releases of accelerate make no mesh with "sp", from which the Trainer of transformers 5.0 takes its process group.
BESIDE_5.0.0 := accelerate==1.12.0

.venv-clients/%/.test: $(VENV)/.test tools/make_layered_venv.py
	$(BIN)/python tools/make_layered_venv.py $(VENV) $(@D) $(if $(filter newest,$*),--upgrade,transformers==$* $(BESIDE_$*))
	@touch $@

lock:
	printf 'scikit-build-core>=0.11\nnanobind>=2.4\n' | uv pip compile --quiet --universal --python-version 3.11 --extra dev --generate-hashes --no-annotate \
	    --custom-compile-command 'make lock' --constraint constraints.txt --output-file requirements.lock pyproject.toml -

bench: $(VENV)/.test
	$(BIN)/python bench/cpu_train.py

bench-infinity: $(VENV)/.test
	$(BIN)/python bench/nvme_training.py

chaos: $(VENV)/.test
	$(BIN)/python bench/kill_and_resume.py

clean:
	rm -rf $(VENV) .venv-clients

# torch is installed first and in its exact version, so that packages that need torch find it and no other build is
# downloaded.
$(VENV)/.torch: $(INPUTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "windlass needs Python 3.11 or newer; name one: make PYTHON=python3.12 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo 'installing into $(VENV), once'
	$(if $(HASHED),$(LOCKED),$(INSTALL) torch)
	@touch $@

# Each extra contains the one before it. An installed extra is not installed again, because that builds the kernels anew.
CONTAINED_demo := .demo
CONTAINED_test := .demo .test
CONTAINED_dev := .demo .test .dev

$(VENV)/.demo $(VENV)/.test $(VENV)/.dev: $(VENV)/.%: $(VENV)/.torch
	$(INSTALL) $(if $(HASHED),--no-deps --no-build-isolation )-e '.[$*]'
	@touch $(addprefix $(VENV)/,$(CONTAINED_$*))
