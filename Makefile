# Everything runs inside .venv, which is made on first use and again only when the pins or the package's metadata change.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test quick lint bench docs reproduce clean

demo: .venv/.installed
	$(BIN)/hemiola demo --out out/demo

# The tests of a file run in one process, files with real clusters first (tests/conftest.py).
TESTS := $(BIN)/pytest -n auto --dist loadfile --no-loadscope-reorder

test: .venv/.installed-dev lint
	$(TESTS) --maxfail=20 --timeout 900

# For daily work: linters and the tests of single parts, in less than two minutes.
quick: .venv/.installed-dev lint
	$(TESTS) -m "not real and not slow"

lint: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The quick version of every published claim; those whose data are not in HEMIOLA_DATA are left out, with a line each.
reproduce: .venv/.installed
	$(BIN)/hemiola reproduce all --quick --resume --out out/reproduce

# The documentation site, in out/site.
docs: .venv/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: .venv/.installed-dev
	$(BIN)/python benchmarks/run.py

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[lab]'
	@touch $@

.venv/.installed-dev: .venv/.installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

clean:
	rm -rf .venv out
