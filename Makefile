# Each target does the set-up it needs; on a fresh clone `make up` or `make test` is enough.
BIN := .venv/bin
STAMP := .venv/.installed
COMPILE := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --fork-strategy fewest \
	--generate-hashes --annotation-style line --no-emit-index-url --custom-compile-command "make lock"

# Most tests wait for processes that they started; the tests of a file share those.
PYTEST := $(BIN)/pytest --numprocesses 2 --dist loadfile

VERSITYGW := $(or $(GOPATH),$(HOME)/go)/bin/versitygw

.DEFAULT_GOAL := venv
.PHONY: venv up test test-integration lint format memory bench bench-gateway bench-pipeline bench-flushes \
	bench-live bench-runs \
	lock clean help

venv: $(STAMP) ## make or refresh .venv from the lock

up: $(STAMP) ## start the platform on this machine; options: make up ARGS="--help"
	$(BIN)/zombi up $(ARGS)

test: $(STAMP) ## run the tests
	$(PYTEST)

test-integration: $(STAMP) $(VERSITYGW) ## run the tests that need real servers: Go, Java and Maven
	$(PYTEST) -m integration

lint: $(STAMP) ## check format, style, types and import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(STAMP) ## rewrite the code in the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

memory: $(STAMP) ## measure the gateway's memory through 20 million events; options: ARGS="--help"
	$(BIN)/python -m bench.memory $(ARGS)

bench: bench-gateway bench-pipeline bench-flushes bench-live bench-runs ## measure what an event costs, from the request to Iceberg

bench-gateway: $(STAMP) ## measure the gateway; options: ARGS="--help"
	@command -v wrk >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get install -y -qq wrk; } || true
	$(BIN)/python -m bench.run $(ARGS)

bench-pipeline: $(STAMP) ## measure the way from hot to Iceberg; options: ARGS="--help"
	$(BIN)/python -m bench.pipeline $(ARGS)

bench-flushes: $(STAMP) ## measure one flush after hundreds of others; options: ARGS="--help"
	$(BIN)/python -m bench.flushes $(ARGS)

bench-live: $(STAMP) ## measure live reads; options: ARGS="--help"
	$(BIN)/python -m bench.live $(ARGS)

bench-runs: $(STAMP) ## measure flushes as Dagster runs them; options: ARGS="--help"
	$(BIN)/python -m bench.runs $(ARGS)

lock: $(BIN)/uv ## resolve the locks again; newest versions: make lock ARGS=--upgrade
	$(COMPILE) $(ARGS) pyproject.toml --group dev -o requirements-dev.lock
	$(COMPILE) pyproject.toml -c requirements-dev.lock -o requirements.lock
	$(COMPILE) --group bootstrap -c requirements-dev.lock -o bootstrap.lock

clean: ## remove everything that can be made again; data stays
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# Bytecode is compiled here because some machines forbid Python to write it later.
$(STAMP): pyproject.toml requirements-dev.lock | $(BIN)/uv
	$(BIN)/uv pip sync --quiet --python .venv --require-hashes --compile-bytecode requirements-dev.lock
	$(BIN)/uv pip install --quiet --python .venv --no-deps --no-build-isolation --editable .
	@touch $@

# An S3 server that checks signatures; building it takes some minutes, once.
$(VERSITYGW):
	go install github.com/versity/versitygw/cmd/versitygw@v1.8.0

$(BIN)/uv:
	python3 -m venv --clear .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r bootstrap.lock
