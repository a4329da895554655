# make demo   set up, then show the whole tool on this machine (no Slurm, no root)
# make quick  the tests of the inner loop: no ranks, no Slurm, two minutes
# make test   set up, install Slurm's packages when allowed (on a terminal it asks), then run every test but the long tier
# make long   set up, then run the tests that make test leaves out: further variants of expensive kinds
# make slurm-matrix VERSION=24.11   the tests of Slurm on another version of it (20.11, 22.05, 24.11, 26.05; root)
# make gpu    what one card shows in ten minutes: tests, speed, memory, hangs (docs/how-to/gpu.md)
# make check  lint, types
# make docs   write the generated pages of docs/reference again
# make site   write the manual as a site to build/site, strictly: a broken link is an error
# make release  wheels, sdist, bsl.pyz, SBOM and hashes into build/release
# make clean  delete what these commands made; runs/ stays

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Most tests wait for a cluster or for ranks: two processes keep two cores busy. tests/conftest.py says what one runs.
SIDE_BY_SIDE := -n 2 --no-loadscope-reorder
# A few tests run on it too: tests/slurm/test_second_version.py, which is skipped where it cannot be installed.
SECOND_SLURM := 24.11
# Thousands of programs start in a run: compiled modules are kept for the next one.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo quick test long slurm-matrix gpu check docs site release clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt .ci/setup-python.sh
	bash .ci/setup-python.sh "$(PYTHON)" "$(VENV)"
	@touch $@

demo: $(READY)
	$(BIN)/bsl demo

quick: $(READY)
	$(BIN)/python -m pytest -n 2 tests/unit -m "not torch and not slow and not long"

test: $(READY)
	bash slurm/minicluster/install.sh || true
	nice bash slurm/minicluster/with-slurm.sh $(SECOND_SLURM) --make >/dev/null 2>&1 &
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) --durations=25

long: $(READY)
	bash slurm/minicluster/install.sh || true
	$(BIN)/python -m pytest -m long --durations=25

slurm-matrix: $(READY)
	bash slurm/minicluster/with-slurm.sh $(VERSION) $(BIN)/python -m pytest tests/slurm -m "not torch and not long"
	bash slurm/minicluster/with-slurm.sh $(VERSION) $(BIN)/python -m pytest tests/slurm/test_accounting.py -m long

gpu: $(READY)
	PYTHON=$(BIN)/python bash benchmarks/gpu_session.sh gpu-session

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy diagnostics/*.py diagnostics/lab/*.py

docs: $(READY)
	$(BIN)/python docs/reference/generate.py

# The variable silences an announcement of the theme's authors.
site: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

release: $(READY)
	$(BIN)/python release/release.py build/release

clean:
	rm -rf $(VENV) .demo build dist
