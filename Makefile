PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip
INSTALL := $(PIP) install --disable-pip-version-check -c constraints.txt
# What pip gets torch by. On another index it may be "torch --index-url URL".
TORCH ?= torch
RUNS := .venv/.runs
STAMP := .venv/.installed
# One thread for each process: ranks share the cores, and results must not depend on how many there are.
ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false TORCH_EXTENSIONS_DIR=$(CURDIR)/.venv/torch_extensions
# Tests start hundreds of programs. None of them compiles our sources again, whatever the shell says.
ENV += PYTHONDONTWRITEBYTECODE=
# Compiled once, in a minute or two, so that no run and no test waits for it.
KERNEL := $(ENV) PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -c \
	'from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load(verbose=False)' >/dev/null

.PHONY: setup demo test test-long mutants check bench families scifact learns chain picture site gpu clean

setup: $(STAMP)

# What training and answering need, and no extra. What is imported is compiled when it first is.
# torch first and by itself: a plain request for it would fetch the CUDA build.
$(RUNS): pyproject.toml constraints.txt
	@mkdir -p .venv && date +%s >.venv/.began
	$(PYTHON) -m venv .venv
	$(INSTALL) --no-compile $(TORCH)
	$(INSTALL) --no-compile -e .
	@echo "$$($(PIP) list --format=freeze --exclude pip --exclude-editable | wc -l) wheels," \
		"$$(du -sm .venv | cut -f1) MB, in $$(($$(date +%s) - $$(cat .venv/.began))) s"
	touch $(RUNS)

# All extras, and what tests and checks need besides.
$(STAMP): $(RUNS)
	$(INSTALL) -e '.[dev,haven]'
	@$(KERNEL) || echo "DeepSpeed's CPU AdamW does not compile here: runs that offload to the CPU will not start"
	touch $(STAMP)

# Trains a small reader and asks it ten questions. Given again, it goes on where it was stopped.
demo: $(RUNS)
	OMP_NUM_THREADS=2 $(BIN)/python -m trainer.demo

# Two processes: a third one would import everything for itself, 40 CPU seconds.
test: setup
	$(ENV) $(BIN)/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder -m "not long"

# What is too slow for `make test`: 45 minutes, before a release.
test-long: setup
	$(ENV) $(BIN)/python -m pytest -n 3 --dist loadscope --no-loadscope-reorder -m long

# One-line faults that tests must notice, each tried alone in a copy of the tree.
mutants: setup
	$(ENV) $(BIN)/python -m tests.mutants.run

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(ENV) $(BIN)/python -m pytest tests/unit tests/contract tests/test_layers.py -m "not long"

bench: setup
	$(BIN)/python benchmarks/engine_overhead.py
	@if [ -d ../shared/data/nq ]; then $(BIN)/python benchmarks/fid.py --data_path ../shared/data/nq; else echo "fid: no ../shared/data/nq, skipped"; fi

# Every family of bases in every task: one table, in half an hour.
families: setup
	$(ENV) $(BIN)/python benchmarks/families.py

# A public number from nothing: all-MiniLM-L6-v2 on SciFact, as it comes and after three fine-tunings.
scifact: setup
	$(BIN)/python benchmarks/minilm.py scifact --data_path "$(or $(DATA),../shared/data/retrieval/scifact)"

# Does it learn? Every reader on the made-up corpus, from nothing, with its counter-check.
learns: setup
	$(BIN)/python benchmarks/learns.py

# Corpus, retriever, reader, verifier: every step measured, on made-up people and places.
chain: setup
	$(BIN)/python benchmarks/chain.py

# The live page of a run, in light and dark, for the front page: docs/pictures/. Needs chromium and chromedriver.
picture: setup
	$(ENV) $(BIN)/python benchmarks/picture.py

# docs/ as a site, in site/; a link that leads nowhere ends it. The pages as Markdown lie beside it, for llms.txt.
site: setup
	$(BIN)/python -m zensical build --strict --clean
	cd docs && find . -name '*.md' -exec cp --parents {} ../site \;

# Everything that wants measuring on a GPU, in 25 minutes; REHEARSE=1 tries it on the CPU, tiny.
gpu: setup
	$(ENV) $(BIN)/python benchmarks/gpu.py --out $(or $(OUT),gpu_results) $(if $(REHEARSE),--rehearse)
	$(BIN)/python benchmarks/gpu_report.py --out $(or $(OUT),gpu_results)

clean:
	rm -rf .venv results out site tmp-cache build *.egg-info .pytest_cache .ruff_cache .hypothesis
