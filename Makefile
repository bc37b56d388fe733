# The same targets people and CI use. `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# What training needs, alone: the quickstart doesn't wait for linters and for libraries that tests compare with.
READY := $(VENV)/.ready
# Processes that share the tests; each has its own pool of ranks. They begin files in the order of tests/conftest.py.
WORKERS ?= 2
# Tests start hundreds of processes: each would compile the package again, three quarters of a second.
unexport PYTHONDONTWRITEBYTECODE
# Rules of the grammar checker that misread names and terms of the field, or prefer another style.
GRAMMAR_OFF := SentenceCapitalization,UseTitleCase,OrthographicConsistency,SplitWords,MergeWords,CompoundNouns,DisjointPrefixes,UseEllipsisCharacter,Dashes,ExpandMemoryShorthands,ExpandTimeShorthands,ExpandControl,ExpandParameter,ExpandArgument,ExpandMinimum,ExpandStandardInputAndOutput,ExpandDirectory,ExpandConfiguration,WrongNegative,Overall,MissingPreposition,MissingTo,SingleBe,PronounInflectionBe,PronounVerbAgreement,MassNouns,CapitalizePersonalPronouns,AllowTo,OneOfTheSingular,ThereToTheir,CallThem,PluralDecades,PhrasalVerbAsCompoundNoun

.PHONY: help quickstart reference test test-slow soak gpu gpu-hour test-models lint docs format clean
help: ## List the targets.
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

$(READY): requirements.txt setup.py setup.cfg
	@echo "Installing into $(VENV): one or two minutes, without further words."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q -c requirements.txt setuptools
	$(BIN)/python -m pip install --disable-pip-version-check -q -c requirements.txt --no-build-isolation -e .
	@touch $@

$(STAMP): $(READY) requirements-dev.txt
	$(BIN)/python -m pip install --disable-pip-version-check -q -r requirements-dev.txt
	@touch $@

quickstart: $(READY) ## Train SwAV on real digit scans at ZeRO level 3 in 2 processes; under 3 minutes on 2 cores.
	$(BIN)/vissl-zero config=quickstart/swav_digits

reference: $(READY) ## Train a recipe at public settings and note its kNN: METHOD=simclr DATA=<folder> [DATASET=cifar10] [EPOCHS=1] ...
	@$(BIN)/python benchmarks/reference.py "$(METHOD)" --data "$(DATA)" $(if $(DATASET),--dataset $(DATASET)) \
		$(if $(EPOCHS),--epochs $(EPOCHS)) $(if $(IMAGES),--images $(IMAGES)) $(if $(SEED),--seed $(SEED)) \
		$(if $(RUN),--run "$(RUN)") $(CHANGES)

test: $(STAMP) ## The tests of every change; about 8 minutes on 2 cores.
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder $(PYTEST_ARGS)

test-slow: $(STAMP) ## The tests that start whole runs or take long; CI runs them too.
	$(BIN)/python -m pytest -m slow -n $(WORKERS) --dist loadgroup --no-loadscope-reorder $(PYTEST_ARGS)

soak: $(STAMP) ## Thousands of spoilt files and mutated configurations, rest of the largest matrices; two hours, not in CI.
	$(BIN)/python -m pytest -m soak $(PYTEST_ARGS)

gpu: $(STAMP) ## The tests that need a CUDA device; counted as skipped without one.
	$(BIN)/python -m pytest tests/gpu -rs $(PYTEST_ARGS)

gpu-hour: $(STAMP) ## What the first hour on a GPU is for: bounded phases, benchmarks/gpu_hour.md; its costs are printed first.
	$(BIN)/python tools/gpu_hour.py $(HOUR_ARGS)

test-models: $(STAMP) ## Real models through initialize, about 2,800 cells; an hour, not part of CI.
	$(BIN)/python -m pip install --disable-pip-version-check -q --no-deps -r tests/models/requirements.txt
	$(BIN)/python -m pytest -m models tests/models -p no:randomly -q -s --tb=no -rN $(PYTEST_ARGS)

lint: $(STAMP) ## Linter, formatter and type checker over everything; spelling and grammar of the documentation.
	$(BIN)/ruff check .
	$(BIN)/ruff check --preview --select DOC102 vissl_zero # arguments that a docstring names exist
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/harper --no-color lint --quiet --format compact --user-dict-path docs/dictionary.txt \
		--ignore $(GRAMMAR_OFF) *.md docs/*.md docs/tutorials/*.md

docs: $(STAMP) ## The documentation site, in build/site; a dead link is an error.
	$(BIN)/python -m pip install --disable-pip-version-check -q --no-deps -r docs/requirements.txt
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

format: $(STAMP) ## Format and fix what can be fixed.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## Remove the environment and caches.
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache
