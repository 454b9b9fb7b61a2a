# `make demo` and `make test` do all set-up on a fresh machine with Python 3.11.
PYTHON ?= python3
BIN := .venv/bin
KERNELS := $(wildcard src/instep/training/*.h src/instep/training/*/*.c)
# Two tests at once: while the ranks of one wait or start, those of the other compute.
AT_ONCE := -n 2 --dist worksteal
# Tests start a thousand processes; each would compile everything anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test components quick nightly gpu mutants suites bench unedited compat docs dist lint style types rewritten clean

demo: .venv/ready
	$(BIN)/python examples/demo.py

# The kernels are compiled when the compiler is there, which `components` may bring.
test:
	$(MAKE) --jobs=2 components .venv/packages
	$(MAKE) .venv/ready
	$(MAKE) --jobs=2 --output-sync lint rewritten
	$(BIN)/python -m pytest $(AT_ONCE) -m "not nightly"

nightly: .venv/ready
	DRAWN_EXAMPLES=200 $(BIN)/python -m pytest tests/test_drawn.py
	DRAWN_LOOPS=300 $(BIN)/python -m pytest tests/test_drawn_loops.py
	$(BIN)/python -m pytest -m nightly

components:
	scripts/components

quick: .venv/ready
	$(BIN)/python -m pytest $(AT_ONCE) -m "not slow and not launch and not nightly" -x -q

# On a machine with an NVIDIA GPU, which the ranks of its tests share.
gpu: .venv/ready
	$(BIN)/python -m pytest -n 8 tests/test_gpu.py

# The map of build/mutants is made once, in the time of the whole suite; with --map, anew.
mutants: .venv/ready
	$(BIN)/python tests/mutation --json build/mutants/table.json $(MUTANTS)

# Other projects' own tests, half an hour; with SUITES=FOLDER also those whose sources are there.
suites: .venv/ready
	$(BIN)/python scripts/suites

bench: .venv/ready .venv-peers/ready
	$(BIN)/python benchmarks/bench.py

# About an hour on two cores. CASES="mingpt timm_loop" runs some.
unedited: .venv-unedited/ready
	.venv-unedited/bin/python benchmarks/unedited_table.py $(CASES) \
		--json benchmarks/results/unedited_table.json --docs

# An environment for each pair of Python and PyTorch, of up to 6 GB. PAIRS="3.13:2.14.1" tries one.
PAIRS ?= 3.11:2.11.0 3.12:2.12.0 3.13:2.14.1
compat:
	"$(PYTHON)" scripts/compat $(PAIRS)

# The site, in English and Chinese; python3 -m http.server -d build/site shows it, with its search.
docs: .venv-docs/ready
	.venv-docs/bin/python scripts/site_pages.py
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet

# The source distribution and the wheel, in dist; CONTRIBUTING.md tells how to release them.
dist: .venv/ready
	@! grep OWNER pyproject.toml || { echo "write the repository's account in place of OWNER"; exit 1; }
	rm -rf dist build/dist
	$(BIN)/python -m build --no-isolation --outdir build/dist
	PATH="$(BIN):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist build/dist/*.whl
	mv build/dist/*.tar.gz dist
	$(BIN)/twine check --strict dist/*

lint: style types

style: .venv/ready
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-cache

types: .venv/ready
	$(BIN)/mypy

# What pytest makes of the files of tests, on the core that mypy leaves free. Errors are seen later.
rewritten: .venv/ready
	@$(BIN)/python -m pytest --collect-only -qq >/dev/null || true

.venv/packages: pyproject.toml constraints.txt scripts/venv
	scripts/venv "$(PYTHON)"
	touch $@

.venv/ready: .venv/packages setup.py $(KERNELS)
	$(BIN)/pip install --quiet --no-deps -e .
	touch $@

.venv-peers/ready: pyproject.toml constraints.txt scripts/horovod
	"$(PYTHON)" -m venv .venv-peers
	.venv-peers/bin/pip install --quiet -c constraints.txt -e . setuptools \
		accelerate lightning-fabric pillow pytorch-ignite
	.venv-peers/bin/pip install --quiet -c constraints.txt --no-build-isolation deepspeed
	scripts/horovod .venv-peers/bin/python || true
	touch $@

.venv-docs/ready: pyproject.toml constraints.txt scripts/docs_venv
	scripts/docs_venv "$(PYTHON)"
	touch $@

.venv-unedited/ready: constraints.txt scripts/unedited_packages benchmarks/unedited_cases/requirements.txt
	scripts/unedited_packages "$(PYTHON)"
	touch $@

clean:
	rm -rf .venv .venv-docs .venv-peers .venv-unedited .venv-compat build dist demo
