# make quickstart | test | test-quick | lint | setup | pictures: each installs what it needs in .venv, once. make gpu installs nothing.

PYTHON ?= python3
BIN := .venv/bin
# The versions that the tests pass on. `make setup CONSTRAINTS=` takes the newest that pyproject.toml allows.
CONSTRAINTS ?= constraints.txt
export OMP_NUM_THREADS ?= 2

.PHONY: quickstart test test-quick lint lint-imports setup constraints pictures gpu clean

quickstart: .venv/installed
	$(BIN)/python train.py

# Two workers of one thread each: most tests start processes or wait, and threads that outnumber cores wait for each other.
test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2

# The fast tests that start no process.
test-quick: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 -m "not processes and not slow"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@$(MAKE) --no-print-directory lint-imports

# import-linter follows no links and wants an __init__.py in every folder, so it gets a copy.
lint-imports: setup
	rm -rf .venv/imports && mkdir .venv/imports && cp -RL farsight .venv/imports
	find .venv/imports/farsight -type d -name __pycache__ -prune -o -type d -exec touch {}/__init__.py \;
	cd .venv/imports && ../bin/lint-imports --no-logo --config ../../pyproject.toml --no-cache

# docs/positions/pictures/*.png, each from the recipe that its page shows (GARFA's from its paper's numbers), and the picture of the README.
pictures: setup
	for recipe in configs/recipes/nano*/*.toml; do \
		name=$${recipe##*/nano_}; \
		$(BIN)/farsight positions $$recipe --picture docs/positions/pictures/$${name%.toml}.png > /dev/null || exit 1; \
	done
	$(BIN)/farsight positions docs/positions/garfa.toml --picture docs/positions/pictures/garfa.png > /dev/null
	$(BIN)/farsight layers --profile configs/finetune/llama3.1_8b_profile.json --picture docs/analysis/pictures/layers.png > /dev/null
	$(BIN)/python docs/pictures/scopes.py

# Everything to check and to measure on a GPU (docs/performance/gpu.md). It installs nothing: this Python needs torch for its GPU.
gpu:
	$(or $(wildcard $(BIN)/python),$(PYTHON)) -m benchmarks.gpu

setup: .venv/installed-dev

# $(call install,EXTRAS): pip may print nothing for two minutes.
define install
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	{ echo "Farsight needs Python 3.11 or later; name one with: make $(or $(MAKECMDGOALS),setup) PYTHON=python3.11"; exit 1; }
test -x $(BIN)/python || $(PYTHON) -m venv .venv
$(BIN)/python -m pip install --quiet --disable-pip-version-check $(CONSTRAINTS:%=--constraint %) --editable '.$(1)'
endef

# What training needs.
.venv/installed: pyproject.toml $(CONSTRAINTS)
	$(call install)
	touch $@

# And what every extra, the tests and lint need.
.venv/installed-dev: pyproject.toml $(CONSTRAINTS)
	$(call install,[dev])
	touch .venv/installed $@

# After a change of versions, with the tests passing.
constraints: setup
	$(BIN)/python -m pip freeze --exclude-editable | sed 's/+[a-z0-9.]*$$//' > constraints.txt

clean:
	rm -rf .venv *.egg-info
