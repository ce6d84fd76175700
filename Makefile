# make run   set up, compile the digits example, train it, print the test accuracy and where the plan lies
# make test  set up and run every check, and all tests but those marked exhaustive, as continuous integration does (some 12
#            minutes on two cores)
# make test-all  the same with the exhaustive ones (some 30 minutes)
# make test ORACLE=1  with PyTorch (CPU) installed as an independent reference: without it the tests that
#            compare with PyTorch are skipped, and say so
# make test NNUNET=1  with nnU-Net installed as well, whose trainer is then tested with steps of mbc
# make test-all SHARES=1  prints the processor seconds of each suite of tests as well (tests/README.md)
# make fuzz  judge hostile inputs until there were INPUTS (1,000,000), going on where it stopped; guided by coverage
#            where atheris can be installed, in an environment of its own (build/fuzz-venv)
# make torture  kill compile, profile and train at KILLS (1,000) random moments, and run them on full disks and the like;
#            WORKERS (1) processes at a time, as for make fuzz
# make tables  write the tables and lists that follow from the declarations of operations: pages, messages, editors' words
# make docs  build the docs site, strictly, into build/site (installs MkDocs in .venv)
# make axe   get axe-core by npm into build/axe, with which tests/report checks pages for accessibility
# make evidence  list the results of benchmarks that are older than the code that they depend on; fails if one on
#                correctness is
#
# PYTHON is the interpreter that .venv is made from (3.11 or newer); VENV_FLAGS goes to `python -m venv`.

PYTHON ?= python3
VENV ?= .venv
VENV_FLAGS ?=

BIN := $(VENV)/bin
BUILD := build
DIGITS := examples/01_digits
SET_UP := $(VENV)/set-up.stamp
SET_UP_CUDA := $(VENV)/set-up-cuda.stamp
TORCH := torch==2.13.0
HAS_TORCH := $(BIN)/python -c 'import importlib.util as i, sys; sys.exit(not i.find_spec("torch"))'
LIGHTNING := lightning>=2.6,<3
MONAI := 'monai>=1.6,<2' 'pytorch-ignite>=0.5,<0.6'
AXE := axe-core@4.14
ATHERIS := atheris>=3.0
FUZZ := $(BUILD)/fuzz-venv/bin/python
INPUTS ?= 1000000
KILLS ?= 1000
WORKERS ?= 1
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: run test test-all setup cuda oracle lightning monai nnunet lint types pytest tables fuzz torture docs axe evidence clean
.DELETE_ON_ERROR:

# Without a GPU the digits are too small for more threads to help, and on a busy machine they wait for each other.
run: export OPENBLAS_NUM_THREADS ?= 1
run: export OMP_NUM_THREADS ?= 1
run: setup cuda $(BUILD)/digits.train.npz
	$(BIN)/mbc compile $(DIGITS)/net.mbc --output $(BUILD)/digits --force
	$(BIN)/mbc train $(BUILD)/digits --data $(BUILD)/digits.train.npz --test $(BUILD)/digits.test.npz \
	    --epochs 12 --lr 0.1 --schedule cosine --warmup 1 --checkpoint $(BUILD)/digits.safetensors
	@echo "plan: $(BUILD)/digits/plan.json (read it with: $(BIN)/mbc show $(BUILD)/digits)"

# Types are judged while tests run, many of which wait for processes: pyright takes minutes of one core.
test: lint
	@$(MAKE) --no-print-directory --jobs 2 types pytest

# With the tests marked exhaustive: whole matrices of kernels, long searches, the digests of all plans.
test-all: export MBC_ALL_TESTS = 1
test-all: test

setup: $(SET_UP)

# Made anew only when what it installs has changed.
$(SET_UP): pyproject.toml
	@echo "setting up $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "mbc needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV_FLAGS) $(VENV)
	@$(PIP) --editable '.[dev]'
	@touch $@

# PyCUDA and the CUDA libraries, only where there is a GPU. Without them everything runs on the CPU.
cuda: $(SET_UP)
	@if nvidia-smi >/dev/null 2>&1 && ! test -e $(SET_UP_CUDA); then \
	    if $(BIN)/python -c 'import pycuda' 2>/dev/null || $(PIP) --editable '.[cuda]'; then touch $(SET_UP_CUDA); \
	    else echo "PyCUDA could not be installed: training on the CPU ('$(BIN)/mbc doctor' says what is missing)"; fi; \
	fi

$(BUILD)/digits.train.npz: $(DIGITS)/prepare.py | $(SET_UP)
	$(BIN)/python $(DIGITS)/prepare.py $(BUILD)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Where PyTorch is not installed its types are unknown, and what is made of them is left out.
types: setup
	@if $(HAS_TORCH); then $(BIN)/pyright; \
	    else $(BIN)/pyright --project pyright.without-torch.json; fi

# Tests of one file go to one worker, which then makes their plans and libraries once (tests/conftest.py). Where the
# environment forbids Python to keep what it compiled, each of the hundreds of processes that tests start would compile
# all of mbc again.
pytest: export PYTHONDONTWRITEBYTECODE :=
pytest: setup $(if $(ORACLE),oracle) $(if $(NNUNET),nnunet)
	$(BIN)/python -m pytest -n auto --dist loadgroup $(if $(SHARES),--shares)

oracle: setup
	@$(HAS_TORCH) || $(PIP) $(TORCH)

# Its trainer is tested where it is installed.
nnunet: oracle
	@$(BIN)/python -c 'import nnunetv2' 2>/dev/null || $(PIP) --editable '.[nnunet]'

# Their examples are tested where they are installed.
lightning: oracle
	@$(BIN)/python -c 'import lightning' 2>/dev/null || $(PIP) '$(LIGHTNING)'

monai: oracle
	@$(BIN)/python -c 'import ignite, monai' 2>/dev/null || $(PIP) $(MONAI)

# One thread each, as tests have it: what is interpreted is small.
fuzz torture: export OPENBLAS_NUM_THREADS ?= 1
fuzz torture: export OMP_NUM_THREADS ?= 1
fuzz:
	@test -x $(FUZZ) || $(PYTHON) -m venv $(VENV_FLAGS) $(BUILD)/fuzz-venv
	@$(FUZZ) -c 'import mbc, onnx' 2>/dev/null || $(FUZZ) -m pip install --quiet --disable-pip-version-check --editable '.[onnx]'
	@$(FUZZ) -c 'import atheris' 2>/dev/null || $(FUZZ) -m pip install --quiet --disable-pip-version-check '$(ATHERIS)' \
	    || echo "atheris is not to be had for this Python: inputs are drawn from seeds"
	$(FUZZ) benchmarks/fuzz.py --inputs $(INPUTS) --workers $(WORKERS)

torture: setup
	$(BIN)/python benchmarks/torture.py --kills $(KILLS) --workers $(WORKERS)

tables: setup
	$(BIN)/python -m pytest -q -n 0 --update-expected tests/ops/test_declarations.py tests/frontend/test_page.py \
	    tests/frontend/test_bad.py tests/editor/test_vscode.py

docs: setup
	@$(BIN)/python -c 'import mkdocs, mkdocstrings' 2>/dev/null || $(PIP) --editable '.[docs]'
	$(BIN)/python -m mkdocs build

axe:
	npm install --no-audit --no-fund --no-package-lock --prefix $(BUILD)/axe $(AXE)

evidence: setup
	$(BIN)/python benchmarks/stale.py --strict

clean:
	rm -rf $(BUILD) dist .pytest_cache .ruff_cache .hypothesis
