# Two commands do everything on a fresh clone: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check install --quiet --constraint constraints.txt
LOCKED := $(BIN)/pip --disable-pip-version-check install --quiet --no-deps --require-hashes --requirement
OWN := $(BIN)/pip --disable-pip-version-check install --quiet --no-deps --no-build-isolation --editable .
# Processes of one thread each: most tests cannot use a second core by themselves. Three for two cores, because some
# tests wait.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3

.PHONY: demo test test-all test-slow browser lint format docs sbom lock bench bench-venvs clean

demo: $(VENV)/demo.stamp  ## four methods on real digits, a table and a picture (about two minutes)
	$(BIN)/python examples/demo.py

test: $(VENV)/dev.stamp lint  ## ruff, mypy and the fast tests
	$(PYTEST) --dist worksteal

test-all: test test-slow  ## the slow stories as well

test-slow: $(VENV)/dev.stamp browser
	$(PYTEST) -m slow --dist loadfile --no-loadscope-reorder

browser:  ## Chromium and its driver for the tests of pages, where they are missing and may be installed
	@command -v chromedriver >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get update -qq && \
		apt-get install -qq -y --no-install-recommends chromium chromium-driver fonts-dejavu-core >/dev/null; } \
		|| echo "NO BROWSER, pages will not be tested: apt-get install chromium chromium-driver mends that"

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/dev.stamp  ## the documentation as pages, in build/site; warnings are errors
	NO_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --strict
	@echo "open build/site/index.html; its search works when served: $(BIN)/python -m http.server -d build/site"

sbom: $(VENV)/dev.stamp  ## what is installed that ssfl needs, as CycloneDX JSON, in build/sbom.json
	mkdir -p build
	$(BIN)/python -m ssfl.runs.sbom report board flower privacy > build/sbom.json

# torch itself is fixed by version alone, because its builds differ by device; what it needs in Python is locked, and so
# is setuptools, which builds ssfl.
LOCK := build/lock/bin/uv pip compile --quiet --universal --generate-hashes --no-annotate --upgrade \
	--python-version 3.11 --no-config --custom-compile-command 'make lock' \
	--override build/without-torch.txt --constraint constraints.txt pyproject.toml build/beside.txt

lock:  ## requirements-dev.lock and requirements-demo.lock anew: versions and hashes of everything but torch, for all platforms
	$(PYTHON) -m venv build/lock
	build/lock/bin/pip --disable-pip-version-check install --quiet uv==0.13.8
	echo "torch ; python_version < '3'" > build/without-torch.txt
	printf '%s\n' 'setuptools>=77' filelock fsspec jinja2 networkx 'sympy>=1.13.3' typing-extensions > build/beside.txt
	$(LOCK) --extra dev --output-file requirements-dev.lock
	$(LOCK) --extra report --constraint requirements-dev.lock --output-file requirements-demo.lock

bench: $(VENV)/demo.stamp bench-venvs  ## the digits job on every runtime (a few minutes)
	$(BIN)/python -m benchmarks digits --repeats 3

bench-venvs: $(VENV)-pfl/stamp $(VENV)-flower/stamp  ## the peers of the benchmarks: their pins disagree

$(VENV)-%/stamp: benchmarks/requirements-%.txt constraints.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)-$*
	$(subst $(BIN),$(VENV)-$*/bin,$(PIP)) torch==2.13.0
	$(subst $(BIN),$(VENV)-$*/bin,$(PIP)) --editable . --requirement $<
	touch $@

$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)

# torch after what it needs, so that pip takes nothing but torch (and a GPU's libraries) without a hash. The lock files
# are complete, so pip need not choose versions: old ones of pip fail at that if a newer version of something whose extra
# is needed appears. "pip check" ends with an error if anything is missing after all.
$(VENV)/%.stamp: requirements-%.lock constraints.txt pyproject.toml | $(BIN)/pip
	$(LOCKED) $<
	$(PIP) torch==2.13.0
	$(OWN)
	$(BIN)/pip --disable-pip-version-check check
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-pfl $(VENV)-flower build dist .mypy_cache .pytest_cache .ruff_cache
