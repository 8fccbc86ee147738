# `make lab` opens the course, `make test` runs its quick tests; `make help` lists the other verbs.
.DEFAULT_GOAL := help
SHELL := /bin/sh
LAB ?= lab1
VENV ?= .venv
# Python keeps what it has compiled; otherwise each of hundreds of processes would compile torch and the course anew.
export PYTHONDONTWRITEBYTECODE :=
# One thread for each process: two multi-threaded torch processes on two cores slow each other down tenfold.
TEST_ENV := OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} MPLBACKEND=Agg PYTHONPATH=

# The Python of the environment that is there, or else the first that the course runs on; `make PYTHON=...` names another.
PYTHON ?= $(shell made_by=$$(sed -n 's/.*"python": "\([^"]*\)".*/\1/p' "$(VENV)/environment.json" 2>/dev/null); \
	for python in $${made_by:+"$$made_by"} python3 python3.12 python3.13 python3.11; do \
	"$$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && echo $$python && break; \
	done)

.PHONY: help env student-env lab test test-e2e site demo test-slow test-gpu test-class test-versions labs lint lock clean

help: ## list the verbs
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile
	@echo "  LAB=lab3 chooses a lab; PYTHON=/path/to/python3.12 chooses a Python."

# $(call sync,EXTRAS): create the environment with these extras, or leave it if it is current.
define sync
	@if [ -z "$(PYTHON)" ]; then \
		echo "error: Python 3.11, 3.12 or 3.13 is needed and none of python3, python3.12, python3.13 and python3.11 is one: install it, or name it with make PYTHON=/path/to/python3.12." >&2; exit 1; fi
	@command -v "$(PYTHON)" >/dev/null || { echo "error: there is no $(PYTHON): name a Python 3.11, 3.12 or 3.13, such as make PYTHON=/usr/bin/python3.12." >&2; exit 1; }
	@"$(PYTHON)" -c "" 2>/dev/null || { echo "error: $(PYTHON) does not answer: name a Python 3.11, 3.12 or 3.13 that runs, such as make PYTHON=/usr/bin/python3.12." >&2; exit 1; }
	@"$(PYTHON)" tools/environment.py sync --venv "$(VENV)" $(addprefix --extra ,$(1))
endef

env: ## create the whole environment in .venv: labs, grading, tests
	$(call sync,grading test)

student-env:
	$(call sync)

lab: student-env ## open JupyterLab on lab1.ipynb (LAB=lab3 for another)
	@"$(VENV)/bin/labs" open "$(LAB)"

# One process more than cores, up to four: many tests wait for a process of their own. On the GPU one test runs at a time.
TEST_PROCESSES ?= $(shell getconf _NPROCESSORS_ONLN 2>/dev/null | awk '{ print ($$1 < 4 ? $$1 + 1 : 4) }')
PYTEST = $(TEST_ENV) "$(VENV)/bin/python" -m pytest
# The tests of a file stay in one process and share its fixtures; the longest files start first (tests/conftest.py).
PARALLEL = -n $(or $(TEST_PROCESSES),2) --dist loadfile --no-loadscope-reorder

test: env ## run the quick tests (four minutes, no GPU needed)
	@$(PYTEST) $(PARALLEL) --durations=15 -m "not slow and not overnight and not gpu"

test-slow: env ## run the tests that `make test` leaves out
	@$(PYTEST) $(PARALLEL) --durations=15 -m "slow and not overnight and not gpu"

test-gpu: env ## run the tests that need an NVIDIA GPU
	@$(PYTEST) -m gpu

test-class: env ## grade 300 submissions, faults among them, and other runs of many minutes
	@$(PYTEST) -m overnight --timeout=3600

test-versions: env ## run quick tests and compile the kernels with the oldest and the newest torch and Triton (half an hour)
	@"$(VENV)/bin/python" -m tools.versions

test-e2e: ## run the tests in a real browser (needs Chromium)
	$(call sync,grading test e2e)
	@$(PYTEST) -m e2e tests/e2e

site: ## build the static site into build/site
	$(call sync,grading site)
	@"$(VENV)/bin/python" -m tools.site

demo: env ## run the four solved labs and write a summary into out/demo
	@"$(VENV)/bin/labs" demo

labs: env ## build the notebooks from instructor/labs
	@"$(VENV)/bin/labs" build

lint: env ## check format, style, imports, types and size
	@failed=0; for check in "ruff format --check ." "ruff check ." "lint-imports" "mypy" "python tools/size.py"; do \
		"$(VENV)/bin/"$$check || { echo "error: $$check found something, see above" >&2; failed=1; }; \
	done; exit $$failed

lock: env ## resolve versions anew: constraints.txt, environment.yml
	@"$(VENV)/bin/python" -m tools.lock

clean: ## remove the environment and build products
	rm -rf "$(VENV)" build *.egg-info
