# make quickstart | test | lint | setup | pictures: each does its own set-up in .venv, and reuses it when nothing changed.

PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS ?= 2

.PHONY: quickstart test lint setup pictures clean

quickstart: setup
	$(BIN)/python train.py

# Two workers of one thread each: most tests start processes or wait, and threads that outnumber cores wait for each other.
test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# docs/positions/pictures/*.png, each from the recipe that its page shows; GARFA's, which no recipe pre-trains, from its paper's numbers.
pictures: setup
	for recipe in configs/recipes/nano_*.toml; do \
		name=$${recipe#configs/recipes/nano_}; \
		$(BIN)/farsight positions $$recipe --picture docs/positions/pictures/$${name%.toml}.png > /dev/null || exit 1; \
	done
	$(BIN)/farsight positions docs/positions/garfa.toml --picture docs/positions/pictures/garfa.png > /dev/null

setup: .venv/installed

# The packages of pyproject.toml, once; pip may print nothing for two minutes.
.venv/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Farsight needs Python 3.11 or later; name one with: make $(or $(MAKECMDGOALS),setup) PYTHON=python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv *.egg-info
