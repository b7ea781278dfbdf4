# Every command starts from a fresh checkout: what it needs is set up first, and skipped when it is there.
# ARGS are added to the last command:  make quickstart ARGS="seed=3"   make test ARGS="-m 'not slow' tests/rewards"
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help quickstart test setup setup-dev lint format lock lock-check model clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 22

quickstart: setup ## train SmolLM2-135M on 4 coding tasks, on this machine's CPU
	.venv/bin/rl360 run experiment=quickstart $(ARGS)

test: setup-dev ## linter, formatter, type checker and all tests
	@scripts/test.sh $(ARGS)

setup: ## .venv with the locked packages, bubblewrap, the model (TORCH=cpu: torch without CUDA)
	@scripts/setup.sh local

setup-dev:
	@scripts/setup.sh dev

lint: setup-dev ## ruff and mypy
	@scripts/lint.sh

format: setup-dev ## let ruff rewrite the sources
	@.venv/bin/ruff check --quiet --fix . ; .venv/bin/ruff format --quiet .

lock: ## compile requirements/*.txt from pyproject.toml (ARGS=--upgrade: to the newest versions)
	@scripts/lock.sh $(ARGS)

lock-check: ## fail when requirements/*.txt are not what `make lock` writes
	@scripts/lock.sh --check

model: ## prepare SmolLM2-135M-Instruct under models/
	@.venv/bin/python -m rl360.models.fetch smollm2_135m $(ARGS)

clean: ## remove caches and build output; .venv, models and outputs stay
	rm -rf .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +
