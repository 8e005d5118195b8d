# Two commands do all the set-up on a machine with Python 3.11 or newer: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint clean

demo: $(VENV)/.demo
	$(BIN)/pybridge demo

test: $(VENV)/.test
	$(BIN)/python tests/run.py

lint: $(VENV)/.test
	$(BIN)/python tests/run.py --only lint

$(VENV)/.demo: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[demo]"
	touch $@

$(VENV)/.test: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[test,notebooks,docs]"
	touch $@

clean:
	rm -rf $(VENV)
