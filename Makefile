# `make demo` and `make test` do all their own set-up; `make env` is a no-op when .venv is current.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.current
SAME_ENVIRONMENT := blosc2,hf-fp8,hf-hqq4
LOSSY := cellar,cellar-small,cellar-fine,fractal,turbo-4,exact

.PHONY: env demo test lint types bench bench-quick fuzz model models-page peers clean

env: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[hf,demo,bench,dev]'
	touch $(STAMP)

demo: env
	$(BIN)/kvcellar demo

model: env
	$(BIN)/python -c "from kvcellar.frontends.cli.demo_model import demo_model; print(demo_model())"

test: env  # on up to four cores, each process with one thread
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses logical --maxprocesses 4

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: env
	$(BIN)/mypy

bench: model  # benchmarks/results, and the README tables made from them
	$(BIN)/python benchmarks/exact.py
	$(BIN)/python benchmarks/million.py
	$(BIN)/python benchmarks/maps.py
	$(BIN)/python benchmarks/search.py
	$(BIN)/python benchmarks/trie.py
	$(BIN)/kvcellar bench --recipes exact --tasks 2 --peers $(SAME_ENVIRONMENT) --out benchmarks/results/bench.json --plot docs/rate-quality.png
	$(BIN)/kvcellar bench --windows 24 --recipes $(LOSSY) --out benchmarks/results/bench-lossy.json --plot docs/rate-quality-lossy.png
	$(BIN)/kvcellar bench --windows 4 --continuation 128 --recipes $(LOSSY) --out benchmarks/results/bench-speed.json
	$(BIN)/kvcellar bench --text ../shared/data/wt2_test.txt --windows 49 --recipes cellar,cellar-small,cellar-fine --out benchmarks/results/bench-encyclopedia.json
	$(BIN)/kvcellar bench --long --windows 6 --text ../shared/data/wt2_test.txt --recipes cellar,cellar-small,cellar-fine --out benchmarks/results/bench-long.json
	$(BIN)/kvcellar bench --windows 8 --recipes turbo-4,turbo-3,turbo-2,fractal --peers turboquant-4,turboquant-3,turboquant-2,nexusquant-k4v4,nexusquant-k3v3,nexusquant-k3v2,nexusquant-k2v2 --out benchmarks/results/bench-turbo.json
	$(BIN)/python benchmarks/baselines/validate_turbo.py
	$(BIN)/kvcellar bench reduce --windows 8 --methods matching,streaming,random --seeds 5 --peers compactor,kvzip --out benchmarks/results/reduce.json --plot docs/reduce-quality.png
	$(BIN)/kvcellar bench quantizers --out benchmarks/results/quantizers.json
	$(BIN)/kvcellar bench --text ../shared/data/wt2_test.txt --windows 8 --recipes cellar,cellar-small,cellar-fine --peers hf-hqq4,turboquant-4,turboquant-3,nexusquant-k3v2,cachegen-1024,kvtc-fine,kvtc,kvtc-small --out benchmarks/results/bench-equal-kl.json
	$(BIN)/kvcellar bench rate --part curve --from benchmarks/results/bench-equal-kl.json --out benchmarks/results/rate-curve.json
	$(BIN)/kvcellar bench rate --windows 12 --out benchmarks/results/rate.json --plot docs/rate.png
	$(BIN)/python benchmarks/risk_theory.py
	$(BIN)/python benchmarks/tree.py --text ../shared/data/wt2_valid.txt
	$(BIN)/python benchmarks/readme.py

bench-quick: env  # 8 windows, all recipes, no peers
	$(BIN)/kvcellar bench --quick --out benchmarks/results/bench-quick.json

fuzz: env  # a million damaged and forged archives, resumable; an hour of both cores
	$(BIN)/python benchmarks/fuzz.py

models-page: env  # docs/models.md
	$(BIN)/python benchmarks/modelpage.py

# Two of transformers' quantized caches need packages here (hqq is built from source against the torch that is here);
# the other packaged peers get environments of their own. What fails leaves the rest usable.
peers: env
	@failed=0; \
	$(BIN)/python -m kvcellar.frontends.bench.environments || failed=1; \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		setuptools wheel ninja einops termcolor \
	&& $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps \
		optimum-quanto==0.2.7 hqq==0.2.8.post1 || failed=1; \
	exit $$failed

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
