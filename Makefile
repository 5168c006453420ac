# Everything that is done to this repository has a target here; CI and pre-commit call the same ones.
#
#   PYTHON=python3.12 make install    choose the interpreter (3.11 or later) the environment is made from
#   VENV=…                            where the environment lives: the active one, else .venv
#   JOBS=4                            how many tests run at the same time (0: one, in this process; default 4: they wait a lot)
#   ARGS='-k launcher -x'             passed on to pytest (test, test-fast, cov), to `ddp run` (demo), to bench, drills, soak

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
VENV ?= $(or $(VIRTUAL_ENV),.venv)
BIN := $(VENV)/bin
PY := $(BIN)/python
# Says for which checkout the environment was installed: a shared one may have moved to another meanwhile.
STAMP := $(VENV)/.ddp-operator-installed
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(CURDIR))
.PHONY: $(STAMP)
endif
ARGS ?=
JOBS ?= 4
# `install` leaves compiling to the first import. Forbidden to keep that, every process would compile PyTorch anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help
help: ## this list
	@echo 'usage: make <target>'
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

##### environment

.PHONY: install
install: $(STAMP) ## make the environment and install everything into it, once

$(PY):
	@test -n '$(PYTHON)' || { echo 'no Python 3.11 or later found: set PYTHON=/path/to/python3.11' >&2; exit 1; }
	@echo "making $(VENV) with $$($(PYTHON) --version)"
	@# A Python without ensurepip (Debian without python3-venv) still works when it has pip itself.
	@$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || { \
		$(PYTHON) -m venv --clear --without-pip $(VENV) && \
		$(PYTHON) -m pip --python $(PY) install --quiet --disable-pip-version-check pip; }

$(STAMP): pyproject.toml .ci/constraints.txt .ci/pytorch.txt | $(PY)
	@echo 'installing the operator, the trainer and their tools (PyTorch is the big one)'
	@# Python compiles what it imports; compiling all of PyTorch here would take as long as installing it.
	@$(PY) -m pip install -qq --no-compile --disable-pip-version-check 'pip>=25.1'  # which knows --group
	@# All that is installed has a hash, except PyTorch, whose files differ between indexes, and this project.
	@$(PY) -m pip install -qq --no-compile --no-deps --require-hashes -r .ci/constraints.txt
	@$(PY) -m pip install -qq --no-compile -r .ci/pytorch.txt
	@$(PY) -m pip install -qq --no-compile --no-build-isolation -e '.[all]' --group dev
	@echo '$(CURDIR)' > $@

# Workers that start together would each compile all of what tests import.
$(VENV)/.ddp-operator-compiled: $(STAMP)
	@$(PY) -m pytest --collect-only -qq >/dev/null 2>&1 || true
	@$(PY) -c 'import tests.support.warm_imports'
	@touch $@

.PHONY: tools
tools: ## install the system tools that optional test tiers use (apt)
	@.ci/tools

.PHONY: constraints
constraints: install ## write this environment's versions and their hashes to .ci/constraints.txt, and the release tools'
	@.ci/freeze $(PY) > .ci/constraints.txt.new
	@mv .ci/constraints.txt.new .ci/constraints.txt
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
test: ## every check and every test that can run here; says which tiers did not, and why
	@.ci/steps install lint typecheck imports verify pytest

.PHONY: pytest
pytest: install $(VENV)/.ddp-operator-compiled ## all test tiers
	@$(PY) -m pytest --numprocesses $(JOBS) --dist worksteal --durations=10 --durations-min=3 $(ARGS)

.PHONY: test-fast
test-fast: install ## unit tests only
	@$(PY) -m pytest tests/unit $(ARGS)

.PHONY: fuzz
fuzz: install ## try thousands of new manifests, lives of a job, lost calls, pages, last words and checkpoints
	@HYPOTHESIS_PROFILE=thorough $(PY) -m pytest tests/property tests/integration/test_apiserver_{manifests,updates}.py \
		--numprocesses $(JOBS) --dist worksteal --verbose --timeout 3600 --durations=10 --durations-min=3 $(ARGS)

.PHONY: nightly
nightly: install ## what is too long for every run: the tests marked so, fuzz, mutate, torch-versions, drills, soak
	@$(MAKE) --keep-going pytest-nightly fuzz mutate torch-versions drills soak

.PHONY: pytest-nightly
pytest-nightly: install s3 ## the tests marked nightly
	@DDP_TEST_NIGHTLY=1 $(PY) -m pytest -m nightly --numprocesses $(JOBS) --dist worksteal --durations=10 $(ARGS)

.PHONY: mutate
mutate: install ## change single lines, and see that the nearest tests notice (ARGS='--sample 200 --seed 7')
	@$(PY) -m tests.mutation $(ARGS)

.PHONY: gpu
gpu: install ## what only a GPU can show
	@$(PY) -m pytest tests/gpu $(ARGS)

.PHONY: cov
cov: install ## all test tiers, with coverage
	@$(PY) -m pytest --cov=ddp_operator --cov=ddp_trainer --cov-report=term-missing:skip-covered $(ARGS)

.PHONY: lint
lint: install ## ruff: rules and format
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .

.PHONY: typecheck
typecheck: install ## mypy, strict
	@$(BIN)/mypy

.PHONY: imports
imports: install ## the layers of docs/architecture.md, as .importlinter has them
	@$(BIN)/lint-imports

.PHONY: security
security: install ## look for known mistakes and holes: bandit, checkov, actionlint, pip-audit (installed apart, the first time)
	@.ci/security $(PY)

.PHONY: house
house: install ## the rules that no linter knows: layout, large files, machine paths
	@$(PY) -m pytest -q tests/unit/test_house.py

.PHONY: verify
verify: install ## fail if a generated file differs from what its generator writes
	@$(PY) .ci/generate.py --check

##### writing

.PHONY: fmt
fmt: install ## let ruff format and fix what it can (FILES=… for some only)
	@$(BIN)/ruff check --quiet --fix-only $(or $(FILES),.)
	@$(BIN)/ruff format $(or $(FILES),.)

.PHONY: generate
generate: install ## write the generated files again (CRD, reference pages)
	@$(PY) .ci/generate.py

.PHONY: docs
docs: ## build the documentation site into build/site; a broken link or anchor fails
	@.ci/docs $(PYTHON)

.PHONY: pictures
pictures: install ## take the pictures of ddp run and of reports in the docs anew, of real runs (needs Chromium)
	@$(PY) -m docs.pictures screens
	@$(PY) -m docs.pictures runs build/pictures

.PHONY: release
release: install ## build all that a release holds into dist/, twice, and try it (ARGS='--registry R --images operator --once')
	@$(PY) .ci/release.py $(ARGS)
	@.ci/release-check $(PY) dist

.PHONY: release-check
release-check: install ## build wheel and sdist, check them, install the wheel in an empty environment
	@.ci/release-check $(PY)

##### running

.PHONY: demo
demo: install ## train on real digits with two torchrun nodes on this machine
	@$(BIN)/ddp run deploy/samples/digits.yaml $(ARGS)

.PHONY: images
images: ## build both images and load them into kind, k3d or minikube, or push them (REGISTRY=registry.example/team)
	@images/build

.PHONY: monitoring
monitoring: ## a Prometheus with the alerts on this machine, for ddp run --metrics-port 9400
	@deploy/monitoring/prometheus/run

.PHONY: bench
bench: install ## measure ddp run and a killed worker's restart against torchrun by hand, and the idle operator
	@$(PY) -m tests.bench.run_overhead $(ARGS)
	@$(PY) -m tests.bench.recovery
	@$(PY) -m tests.bench.warm_start
	@$(PY) -m tests.bench.operator_idle

.PHONY: bench-scale
bench-scale: install ## measure the operator with many jobs, at the kube-apiserver of KUBEBUILDER_ASSETS and beside a JobSet
	@$(PY) -m tests.bench.operator_scale $(ARGS)
	@$(PY) -m tests.bench.beside_jobset
	@$(PY) -m tests.bench.hostile_input

.PHONY: scale
scale: install ## a job of 1,000 pods, 1,000 jobs of 8, agents that meet, dashboards of 8,000 ranks; each as far as its programs are installed
	@for part in large_jobs rendezvous dashboards; do echo "== $$part"; $(PY) -m tests.bench.$$part || true; done

.PHONY: drills
drills: install ## break real jobs in every way we know, and see that nothing is lost (ARGS='--list', '--only NAME', '--runs 3')
	@$(PY) -m tests.drills $(ARGS)

.PHONY: soak
soak: install ## very many jobs, and whether memory, files, threads or processes grow with them
	@$(PY) -m tests.drills.soak $(ARGS)

.PHONY: s3
s3: install ## s3fs and moto for the tests of checkpoint.url (a folder of their own: they want an older dateutil)
	@test -d build/s3 || $(PY) -m pip install --quiet --target build/s3 s3fs 'moto[s3]' flask flask-cors

.PHONY: torch-versions
torch-versions: install ## run the launcher's process tests on other torch versions, the trainer's on the newest (ARGS=--strict)
	@.ci/torch-versions $(PY) $(ARGS)

.PHONY: e2e
e2e: install ## the e2e tier: on a new kind cluster, or on the cluster of DDP_E2E_KUBECONFIG
	@if [ -n "$${DDP_E2E_KUBECONFIG:-}" ]; then $(PY) -m pytest tests/e2e $(ARGS); \
	else PYTHON=$(PY) deploy/kind/e2e $(ARGS); fi
