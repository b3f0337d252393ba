# `make demo` and `make test` build what they need; a second run builds nothing.
#
#   demo      an asynchronous training run, measured (ARGS="..." for its options)
#   demo-trl  the same by TRL's trainer, against a vLLM server
#   test      lint, types, the core's tests, the engine tests under both vLLM versions
#   test-all  the same with the tests marked slow
#   engine-tests-next  the same tests on a vLLM without a build for the CPU (NEXT=0.33.0)
#   verl-tests  the adapter for verl against verl's released classes
#   coverage  branches that tests without an engine reach: all of the evidence core, most of the core
#   mutants   breaks the arithmetic in some 1,900 ways and asks the tests (MODULES="spans ..."; long)
#   explore   the random histories, forty times as many, drawn anew (EXAMPLES=20000)
#   bench     the benchmarks: ratios, each taken in one run
#   pictures  the pictures of the README, made anew from two runs of the demo (needs Chromium)
#   lint, types, format, clean

PYTHON ?= python3.11
ARGS ?=
NOT_SLOW = and not slow

NEW := .venv
OLD := .venv-vllm029
OVERLAY := .vllm-next
VERL := .venv-verl
TYPED = rl_staleness examples $(wildcard tests/typing)
ENGINE_TESTS = $(shell grep -rl --include='test_*.py' 'mark\.engine' tests)

empty :=
space := $(empty) $(empty)
comma := ,
EVIDENCE = $(subst $(space),$(comma),$(patsubst %,rl_staleness/%.py,spans ledger staleness groups \
	refits listings ranges events trace))
CORE_TESTS = $(patsubst %,tests/test_%.py,arithmetic ranges spans ledger refits listings groups \
	trace bad_traces properties callback lost_evidence resume faults doctor lens report artifacts)
REACHED = 95
MODULES =
EXAMPLES ?= 20000
NEXT ?= 0.33.0

# Nothing here reports home or asks a model hub.
export VLLM_NO_USAGE_STATS ?= 1
export DO_NOT_TRACK ?= 1
export HF_HUB_OFFLINE ?= 1
export HF_HUB_DISABLE_TELEMETRY ?= 1
export MLFLOW_DISABLE_TELEMETRY ?= true
export RAY_USAGE_STATS_ENABLED ?= 0
export PYRIGHT_PYTHON_IGNORE_WARNINGS ?= 1

# vLLM without a GPU: small, on one machine, and without the C++ compiler that torch.compile wants.
ifeq ($(shell nvidia-smi -L >/dev/null 2>&1 && echo GPU),)
export VLLM_CPU_KVCACHE_SPACE ?= 1
export VLLM_HOST_IP ?= 127.0.0.1
export OMP_NUM_THREADS ?= 1
export TORCH_COMPILE_DISABLE ?= 1
endif

.PHONY: demo demo-trl test test-all core-tests engine-tests engine-tests-029 engine-tests-next verl-tests lint types format coverage mutants explore bench pictures clean
.NOTPARALLEL:
.DELETE_ON_ERROR:

demo: $(NEW)/.ready
	$(NEW)/bin/python examples/async_grpo.py $(ARGS)

demo-trl: $(NEW)/.ready
	$(NEW)/bin/python examples/trl_async_grpo.py $(ARGS)

test: lint types core-tests engine-tests engine-tests-029

test-all: NOT_SLOW =
test-all: test

# They wait more than they work: three at a time, a module in one process.
core-tests: $(NEW)/.ready
	$(NEW)/bin/python -m pytest -m "not engine $(NOT_SLOW)" -n 3 --dist loadfile --durations 12

engine-tests: $(NEW)/.ready
	$(NEW)/bin/python -m pytest -m "engine $(NOT_SLOW)" $(ENGINE_TESTS)

engine-tests-029: $(OLD)/.ready
	$(OLD)/bin/python -m pytest -m "engine $(NOT_SLOW)" $(ENGINE_TESTS)

# Its Python on the compiled parts of the newest vLLM that has such a build.
engine-tests-next: $(NEW)/.ready
	@sh .ci/overlay $(NEW)/bin/python $(NEXT) $(OVERLAY)
	PYTHONPATH=$(CURDIR)/$(OVERLAY) $(NEW)/bin/python -m pytest -m "engine $(NOT_SLOW)" \
		tests/test_vllm.py tests/test_vllm_server.py tests/test_vllm_plugin.py

# verl pins versions that vLLM does not take: its released classes have an environment of their own.
verl-tests: $(VERL)/.ready
	$(VERL)/bin/python -m pytest tests/test_verl.py

# What turns evidence into numbers is run to its last branch by quick tests of single values.
coverage: $(NEW)/.ready
	$(NEW)/bin/python -m pytest -m "not engine and not slow" -k "not memory" \
		--cov=rl_staleness --cov-report= $(CORE_TESTS)
	$(NEW)/bin/coverage report --show-missing --fail-under=100 --include="$(EVIDENCE)"
	$(NEW)/bin/coverage report --skip-covered --fail-under=$(REACHED) --omit="*integrations*"

mutants: $(NEW)/.ready
	$(NEW)/bin/python -m tests.mutation $(MODULES)

explore: $(NEW)/.ready
	RL_STALENESS_EXAMPLES=$(EXAMPLES) $(NEW)/bin/python -m pytest tests/test_properties.py

lint: $(NEW)/.ready
	$(NEW)/bin/ruff check .
	$(NEW)/bin/ruff format --check .

# pyright does not follow the link to the integrations.
types: $(NEW)/.ready
	$(NEW)/bin/mypy $(TYPED)
	$(NEW)/bin/pyright rl_staleness/integrations $(TYPED)

format: $(NEW)/.ready
	$(NEW)/bin/ruff check --fix .
	$(NEW)/bin/ruff format .

bench: $(NEW)/.ready
	set -e; for script in tests/bench/bench_*.py; do $(NEW)/bin/python $$script; done

pictures: $(NEW)/.ready
	$(NEW)/bin/python -m tests.pictures

clean:
	rm -rf $(NEW) $(OLD) $(VERL) $(OVERLAY) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# An environment is made anew when its lock changes; this package is linked into it anew when its
# metadata changes.
$(NEW)/.packages: .ci/locks/vllm-0.32.txt
	@sh .ci/environment "$(PYTHON)" $(NEW) $< --editable ".[vllm,ray,wandb,mlflow,trl,report,dev]"

$(OLD)/.packages: .ci/locks/vllm-0.29.txt
	@sh .ci/environment "$(PYTHON)" $(OLD) $< --editable ".[vllm]" vllm==0.29.0 pytest pytest-timeout hypothesis "setuptools>=77"

$(VERL)/.packages: .ci/locks/verl-0.9.1.txt
	@sh .ci/environment "$(PYTHON)" $(VERL) $< --editable . "verl[verl-core]==0.9.1" pytest pytest-timeout "setuptools>=77"

%/.ready: %/.packages setup.cfg pyproject.toml
	@$*/bin/python -m pip install -qq --no-deps --no-build-isolation --editable .
	@touch $@
