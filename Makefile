PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PACKAGE := $(VENV)/.installed-package
STAMP := $(VENV)/.installed
DOCS := $(VENV)/.installed-docs
GPU_PYTHON ?= python3
# One more than there are cores: some tests wait for processes and for time.
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(1 + (os.cpu_count() or 1))')

.PHONY: help setup demo reproduce test long lint types check wheel site-wheel docs docs-quick release lowest bench chaos fuzz faults parity gpu gpu-interpreted clean

help: ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 18

setup: $(STAMP) ## Create .venv with the package, its command and all tools

$(STAMP): $(PACKAGE)
	@echo "the tools for tests are installed into $(VENV): some minutes"
	$(BIN)/python -m pip install --quiet --editable . --group dev
	@touch $(STAMP)

$(PACKAGE): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "emfed needs Python 3.11 or newer, set PYTHON=")'
	@echo "emfed and what it needs are installed into $(VENV): a minute or two"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --editable .
	@touch $(PACKAGE)

demo: $(PACKAGE) ## Run FedEM and VR-FedEM on the synthetic mixture
	$(BIN)/emfed demo

reproduce: setup ## Redo the paper's experiments and all ablations, with a report
	$(BIN)/python -m paper all --out reproduction

test: setup ## Run all tests
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

long: setup ## Run the larger versions of some tests, which take minutes
	$(BIN)/python -m pytest -n auto -m long

lint: setup ## Check style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup ## Check types
	$(BIN)/mypy

wheel: setup ## Build the wheel and try it in an empty environment
	rm -rf dist build/wheel-venv
	$(BIN)/python -m build --wheel --outdir dist . > /dev/null
	$(PYTHON) -m venv build/wheel-venv
	build/wheel-venv/bin/python -m pip install --quiet dist/*.whl
	cd build && wheel-venv/bin/emfed demo --epochs 5 --out wheel-demo --json
	cd build && wheel-venv/bin/emfed plan --json > /dev/null

site-wheel: setup ## Build emfed-site, the wheel for sites that only join
	$(BIN)/python -m build --wheel --outdir dist packaging/site > /dev/null

check: lint types test wheel ## Everything CI runs

release: ## Build twice from the last commit, compare the bits; try the wheel; SBOM; CITATION.cff
	PYTHON=$(PYTHON) .ci/release

lowest: build/lowest/.installed ## Run a part of the tests with the oldest dependencies allowed
	SCIPY_ARRAY_API=1 build/lowest/bin/python -m pytest -n auto $(LOWEST_TESTS)  # for scikit-learn's checks

LOWEST_TESTS := tests/contracts tests/core tests/data tests/cli tests/artifacts tests/fitting/estimators \
	tests/network/test_guide.py

build/lowest/.installed: pyproject.toml
	$(PYTHON) -m venv build/lowest
	build/lowest/bin/python -m pip install --quiet 'pip>=25.1' uv
	build/lowest/bin/uv pip install --python build/lowest/bin/python --resolution lowest-direct '.[excel]'
	build/lowest/bin/uv pip install --python build/lowest/bin/python pytest pytest-xdist hypothesis \
		array-api-strict dp-accounting hmmlearn pandas statsmodels xlsxwriter
	@touch $@

SITE = $(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --jobs auto docs build/site

docs: $(DOCS) ## Build the site in build/site; run its examples, draw its figures, check its links
	$(BIN)/python docs/draw.py
	$(BIN)/python -m pytest -n auto -m 'long or not long' tests/architecture/test_docs.py \
		tests/network/test_guide.py
	$(SITE) --fresh-env  # what an interrupted build left would have no index for the search
	@echo "the site is build/site/index.html"

docs-quick: $(DOCS) ## Build the site with its links checked, but without running anything
	EMFED_DOCS_QUICK=1 $(SITE)

$(DOCS): $(STAMP)
	$(BIN)/python -m pip install --quiet --group docs
	@touch $(DOCS)

bench: setup ## Measure speed, bytes, scale, files, theory and imputation beside peers (installs pfl)
	$(BIN)/python -m pip install --quiet --group bench
	$(BIN)/python -m benchmarks --json build/benchmarks.json
	$(BIN)/python -m benchmarks page

chaos: setup ## Kill real processes, and judge what comes out
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.chaos --json build/chaos.json

fuzz: setup ## Feed a million inputs to the decoders (installs atheris)
	$(BIN)/python -m pip install --quiet atheris
	mkdir -p build/fuzz
	$(BIN)/python -m tests.fuzz.decoders -runs=1000000 -max_len=160 -rss_limit_mb=1500 -timeout=10 build/fuzz

faults: setup ## Try ten thousand random faults of network, processes and disks
	$(BIN)/python -m benchmarks faults --plans 10000 --keep build/faults.jsonl --json build/faults.json

parity: setup ## Compare every face, place and task of a fit: same parameters, rounds and bytes
	EMFED_PARITY=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto -rs tests/network/test_parity.py

gpu: ## Test the kernels on this machine's GPU and measure them beside their peers
	PYTHONPATH=src $(GPU_PYTHON) -m benchmarks.gpu --tests --out build/gpu.md

gpu-interpreted: build/gpu-venv/.installed ## Test the kernels without a GPU (installs torch and triton)
	TRITON_INTERPRET=1 PYTHONPATH=src build/gpu-venv/bin/python -m pytest -q tests/models/devices tests/data/test_devices.py
	TRITON_INTERPRET=1 PYTHONPATH=src build/gpu-venv/bin/python -m benchmarks.gpu --rehearse

build/gpu-venv/.installed: pyproject.toml
	$(PYTHON) -m venv build/gpu-venv
	build/gpu-venv/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	# Triton's interpreter converts arrays of one number, which numpy refuses from 2.4 on.
	build/gpu-venv/bin/python -m pip install --quiet --editable . torch triton pytest hypothesis 'numpy<2.4'
	@touch $@

clean: ## Remove what the targets made
	rm -rf $(VENV) dist build docs/generated demo reproduction .mypy_cache .ruff_cache .pytest_cache .hypothesis
