# make serve   install what is needed and serve the demo model on http://127.0.0.1:8000
# make test    install what is needed and run all tests
# make sanitize  every kernel once, under compute-sanitizer's memcheck (needs a GPU)
# ARGS="..."   is passed on:  make serve ARGS="--port 9000",  make test ARGS="tests/model -k rope"
# PIP_ARGS     likewise to pip, e.g. to take the CPU build of torch on Linux (see README.md)

PYTHON ?= python3
VENV := .venv
PIP := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(PIP_ARGS)

.PHONY: serve test install lint types sanitize clean

serve: install
	$(VENV)/bin/vl2 serve $(ARGS)

test: $(VENV)/.test
	$(VENV)/bin/python -m pytest $(ARGS)

lint: $(VENV)/.test
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .

types: $(VENV)/.test
	$(VENV)/bin/mypy

# The first run compiles the kernels; torch's cache of memory would hide a read beyond an array.
sanitize: $(VENV)/.serve
	$(VENV)/bin/python -m kernels.bench --once $(ARGS)
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 2 \
	    $(VENV)/bin/python -m kernels.bench --once $(ARGS)

install: $(VENV)/.serve

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("VL2 needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.serve: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing VL2 into $(VENV) (the first time takes a few minutes)"
	$(PIP) -e .
	@touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing VL2 and its test tools into $(VENV) (the first time takes a few minutes)"
	$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/.serve

clean:
	rm -rf $(VENV) *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
