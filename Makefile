# The targets for development. CI and pre-commit use them too.
#
#   PYTHON=python3.12 make install    interpreter of the environment (3.11 or later)
#   VENV=…                            folder of the environment; default: the active one, else .venv
#   JOBS=4                            number of parallel tests (0: one, in this process); most of them wait, so 4 by default
#   ARGS='-k launcher -x'             arguments for pytest (test, test-fast, cov), `ddp run` (demo), bench, drills, soak

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
VENV ?= $(or $(VIRTUAL_ENV),.venv)
BIN := $(VENV)/bin
PY := $(BIN)/python
# Contains the checkout that the environment was installed for: a shared environment may serve another checkout now.
STAMP := $(VENV)/.ddp-operator-installed
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(CURDIR))
.PHONY: $(STAMP)
endif
ARGS ?=
JOBS ?= 4
# `install` does not compile; the first import does. With this variable every process would compile PyTorch again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help
help: ## print this list
	@echo 'usage: make <target>'
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

##### environment

.PHONY: install
install: $(STAMP) ## create the environment and install everything, once

$(PY):
	@test -n '$(PYTHON)' || { echo 'no Python 3.11 or later found; set PYTHON=/path/to/python3.11' >&2; exit 1; }
	@echo "creating $(VENV) with $$($(PYTHON) --version)"
	@# A Python without ensurepip (Debian without python3-venv) suffices if it has pip.
	@$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || { \
		$(PYTHON) -m venv --clear --without-pip $(VENV) && \
		$(PYTHON) -m pip --python $(PY) install --quiet --disable-pip-version-check --require-hashes -r .ci/pip.txt; }

$(STAMP): pyproject.toml .ci/pip.txt .ci/constraints.txt .ci/pytorch.txt | $(PY)
	@echo 'installing the operator, the trainer and their tools (PyTorch takes longest)'
	@# Python compiles at import; compiling all of PyTorch here would take as long as the installation.
	@$(PY) -m pip install -qq --no-compile --disable-pip-version-check --require-hashes -r .ci/pip.txt
	@# All packages have hashes, except PyTorch and what it requires, whose files differ between indexes. The last step
	@# downloads nothing: a package that the locks lack ends it.
	@$(PY) -m pip install -qq --no-compile --no-deps --require-hashes -r .ci/constraints.txt
	@$(PY) -m pip install -qq --no-compile -r .ci/pytorch.txt
	@$(PY) -m pip install -qq --no-compile --no-index --no-build-isolation -e '.[all]' --group dev
	@echo '$(CURDIR)' > $@

# Otherwise all test workers would compile the imported modules at the same time.
$(VENV)/.ddp-operator-compiled: $(STAMP)
	@$(PY) -m pytest --collect-only -qq >/dev/null 2>&1 || true
	@$(PY) -c 'import tests.support.warm_imports'
	@touch $@

.PHONY: tools
tools: ## install the system tools that optional test tiers use (apt)
	@.ci/tools

.PHONY: constraints
constraints: install ## write this environment's versions and hashes to .ci/constraints.txt, and those of the release tools
	@.ci/freeze $(PY) > .ci/constraints.txt.new
	@mv .ci/constraints.txt.new .ci/constraints.txt
	@{ head -1 .ci/pip.txt; .ci/lock $(PY) <<< 'pip>=25.1'; } > .ci/pip.txt.new
	@mv .ci/pip.txt.new .ci/pip.txt
	@.ci/lock $(PY) < .ci/release-tools.in > .ci/release-tools.txt
	@.ci/lock $(PY) < .ci/site/requirements.in > .ci/site/requirements.txt
	@.ci/lock-images $(PY)
	@touch $(STAMP)

.PHONY: clean
clean: ## remove caches and build outputs (not the environment, not ddp-runs/)
	@rm -rf build dist .coverage htmlcov .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find operator trainer tests -name __pycache__ -type d -prune -exec rm -rf {} +

##### checks

.PHONY: test
test: ## run every check and every test that this machine supports; list the tiers that did not run, with reasons
	@.ci/steps install lint typecheck imports verify pytest

.PHONY: pytest
pytest: install $(VENV)/.ddp-operator-compiled ## run all test tiers
	@$(PY) -m pytest --numprocesses $(JOBS) --dist worksteal --durations=10 --durations-min=3 $(ARGS)

.PHONY: test-all
test-all: ## the same with all tests that run real processes
	@DDP_TEST_ALL=1 $(MAKE) test

.PHONY: test-fast
test-fast: install ## run the unit tests
	@$(PY) -m pytest tests/unit $(ARGS)

.PHONY: fuzz
fuzz: install ## try thousands of generated manifests, job histories, failed calls, pages, termination messages and checkpoints
	@HYPOTHESIS_PROFILE=thorough $(PY) -m pytest tests/property tests/integration/test_apiserver_{manifests,updates}.py \
		--numprocesses $(JOBS) --dist worksteal --verbose --timeout 3600 --durations=10 --durations-min=3 $(ARGS)

.PHONY: nightly
nightly: install ## run the long checks: tests marked nightly, fuzz, mutate, torch-versions, recipes, features, launcher-features, drills, soak
	@$(MAKE) --keep-going pytest-nightly fuzz mutate torch-versions recipes features launcher-features drills soak

.PHONY: pytest-nightly
pytest-nightly: install s3 ## run the tests marked nightly, and those that `make test` leaves out
	@DDP_TEST_NIGHTLY=1 $(PY) -m pytest -m 'nightly or more' --numprocesses $(JOBS) --dist worksteal --durations=10 $(ARGS)
	@DDP_TEST_NIGHTLY=1 $(PY) -m pytest tests/repository

.PHONY: mutate
mutate: install ## change single lines and check that tests fail (ARGS='--sample 200 --seed 7')
	@$(PY) -m tests.mutation $(ARGS)

.PHONY: gpu
gpu: install ## run tests and measurements on a GPU within 480 s (ARGS='--device cpu --quick' rehearses them, '--only NAME,NAME')
	@PYTHON=$(PY) tests/gpu/run $(ARGS)

.PHONY: cov
cov: install ## run all test tiers with coverage
	@$(PY) -m pytest --cov=ddp_operator --cov=ddp_pod --cov=ddp_cli --cov=ddp_sdk --cov=ddp_trainer --cov-report=term-missing:skip-covered $(ARGS)

.PHONY: lint
lint: install ## check rules and format with ruff
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .

.PHONY: typecheck
typecheck: install ## check types with mypy, strict
	@$(BIN)/mypy

.PHONY: imports
imports: install ## check the layers of docs/architecture.md (.importlinter)
	@$(BIN)/lint-imports

.PHONY: security
security: install ## scan for security problems: bandit, checkov, actionlint, pip-audit (in a separate environment)
	@.ci/security $(PY)

.PHONY: house
house: install ## check rules without a linter: layout, large files, machine paths
	@$(PY) -m pytest -q tests/unit/test_house.py

.PHONY: verify
verify: install ## fail if a generated file is outdated
	@$(PY) .ci/generate.py --check

##### writing

.PHONY: fmt
fmt: install ## format and fix with ruff (FILES=… for selected files)
	@$(BIN)/ruff check --quiet --fix-only $(or $(FILES),.)
	@$(BIN)/ruff format $(or $(FILES),.)

.PHONY: generate
generate: install ## write the generated files (CRD, reference pages)
	@$(PY) .ci/generate.py

.PHONY: docs
docs: ## build the documentation site into build/site; a broken link or anchor fails
	@.ci/docs $(PYTHON)

.PHONY: pictures
pictures: install ## take the pictures of ddp run and of reports for the docs from real runs (needs Chromium)
	@$(PY) -m docs.pictures screens
	@$(PY) -m docs.pictures runs build/pictures

.PHONY: release
release: install ## build a release into dist/, twice, and test it (ARGS='--registry R --images operator --once')
	@$(PY) .ci/release.py $(ARGS)
	@.ci/release-check $(PY) dist

.PHONY: release-check
release-check: install ## build and check wheel and sdist; install the wheel in an empty environment
	@.ci/release-check $(PY)

##### running

.PHONY: demo
demo: install ## train on real digits with two torchrun nodes on this machine
	@$(BIN)/ddp run deploy/samples/digits.yaml $(ARGS)

.PHONY: images
images: ## build both images and load them into kind, k3d or minikube, or push them (REGISTRY=registry.example/team)
	@images/build

.PHONY: monitoring
monitoring: ## run a Prometheus with the alerts on this machine, for ddp run --metrics-port 9400
	@deploy/monitoring/prometheus/run

.PHONY: bench
bench: install ## measure ddp run and a worker's restart relative to plain torchrun, and the idle operator
	@$(PY) -m tests.bench.run_overhead $(ARGS)
	@$(PY) -m tests.bench.recovery
	@$(PY) -m tests.bench.warm_start
	@$(PY) -m tests.bench.step_hook
	@$(PY) -m tests.bench.check_cost
	@$(PY) -m tests.bench.memory_copies
	@$(PY) -m tests.bench.operator_idle

.PHONY: bench-scale
bench-scale: install ## measure the operator with many jobs, with the kube-apiserver of KUBEBUILDER_ASSETS
	@$(PY) -m tests.bench.operator_scale $(ARGS)
	@$(PY) -m tests.bench.hostile_input

.PHONY: compare
compare: install ## measure this operator beside JobSet, Kubeflow Trainer and KubeRay in turn, with their programs (tests/bench/neighbours.py)
	@$(PY) -m tests.bench.compare $(ARGS)

.PHONY: scale
scale: install ## measure a job of 1,000 pods, 1,000 jobs of 8, the rendezvous, and dashboards of 8,000 ranks; needs their programs
	@for part in large_jobs rendezvous dashboards; do echo "== $$part"; $(PY) -m tests.bench.$$part || true; done

.PHONY: drills
drills: install ## inject faults into real jobs and check the recovery (ARGS='--list', '--only NAME', '--runs 3')
	@$(PY) -m tests.drills $(ARGS)

.PHONY: soak
soak: install ## run many jobs and measure the growth of memory, files, threads and processes
	@$(PY) -m tests.drills.soak $(ARGS)

.PHONY: s3
s3: install ## install s3fs and moto for the tests of checkpoint.url, in a separate folder (they need an older dateutil)
	@test -d build/s3 || $(PY) -m pip install --quiet --target build/s3 s3fs 'moto[s3]' flask flask-cors

.PHONY: torch-versions
torch-versions: install ## run the launcher's process tests on other torch versions, the trainer's on the newest (ARGS=--strict)
	@JOBS=$(JOBS) .ci/torch-versions $(PY) $(ARGS)

.PHONY: features
features: install ## delete each feature in a copy, and check types and tests of the kernel there (ARGS=drains)
	@JOBS=$(JOBS) .ci/features $(PY) $(ARGS)

.PHONY: launcher-features
launcher-features: install ## the same for the features of the launcher (ARGS=mirror)
	@JOBS=$(JOBS) .ci/launcher-features $(PY) $(ARGS)

.PHONY: recipes
recipes: install ## run the recipes with the newest releases of their libraries (ARGS='-k trl')
	@JOBS=$(JOBS) .ci/recipes $(PY) $(ARGS)

.PHONY: e2e
e2e: install ## run the e2e tier on a new kind cluster, or on the cluster of DDP_E2E_KUBECONFIG
	@if [ -n "$${DDP_E2E_KUBECONFIG:-}" ]; then $(PY) -m pytest tests/e2e $(ARGS); \
	else PYTHON=$(PY) deploy/kind/e2e $(ARGS); fi
