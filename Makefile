# What a newcomer and CI type. Everything lives in .venv; nothing outside the clone is changed.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

QUICK := not slow and not device and not browser
FAST := -q -m "$(QUICK)"
# Two processes: XLA compiles in threads, Python between compiles does not. worksteal hands each a run of
# tests that lie together, so that what modules share is built once.
TWICE := -n 2 --dist worksteal
OLDEST_JAX := $(shell sed -n 's/^ *"jax>=\(.*\)",$$/\1/p' pyproject.toml)
export PROMPT ?= Explain in two sentences why the sky is blue.

.PHONY: help venv environments demo test test-all test-browser test-notebooks test-oldest test-topologies lint api models clean

help: ## say what there is
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

venv: .venv/.installed ## make .venv with everything installed (nothing to do when up to date)

environments: venv .venv-oldest/.installed .venv-tpu/.installed ## .venv and those of test-oldest and test-topologies; -j2 helps

.venv/.installed: pyproject.toml scripts/make_venv.sh
	@scripts/make_venv.sh .venv -e '.[dev]'
	@touch $@

demo: venv ## answer a chat prompt with a real model, on CPU; PROMPT="..." asks something else
	@model=$$(.venv/bin/python scripts/fetch_demo_model.py); \
	.venv/bin/jaxgen chat "$$model" --prompt "$$PROMPT"

test: venv ## the fast tests
	.venv/bin/python -m pytest $(FAST) $(TWICE)

test-all: venv ## every test that needs no accelerator, the long ones included
	.venv/bin/python -m pytest -q -m "not device"

test-notebooks: venv ## run every notebook from its first cell to its last
	.venv/bin/python -m pytest -q tests/notebooks

CHROMIUM = $(firstword $(foreach name,chromium-headless-shell chromium,$(shell command -v $(name))))
test-browser: venv ## the status page in a real browser
	@[[ -n "$(CHROMIUM)" ]] || { echo "needs a browser: apt-get install chromium-headless-shell" >&2; exit 1; }
	.venv/bin/python -m pytest -q -m browser tests/serving/test_status_page.py

# What never meets JAX is not run twice, nor what varies requests, options, meshes or plain arrays over the
# same steps: each kernel, a model of each kind of layer, loading, sampling and kept programs are.
ONCE := architecture notebooks cli verify text ragged schedule serving deployments bench topologies checkpoints/readers families \
	plan/test_memory.py plan/test_plan_command.py sampling/test_mesh.py kernels/ragged_attention/test_int32.py \
	$(foreach name,ahead company demands faults loop mesh prefix_cache put scales static_batch,engine/test_$(name).py) \
	$(foreach name,expert_mlp layer_chain mixture_chain product,kernels/$(name)/test_plain.py)
test-oldest: .venv-oldest/.installed ## the fast tests that meet JAX, on the oldest that pyproject.toml allows
	.venv-oldest/bin/python -m pytest -q -m "$(QUICK) and not newest" $(TWICE) $(ONCE:%='--ignore-glob=tests/%')

.venv-oldest/.installed: pyproject.toml scripts/make_venv.sh
	@scripts/make_venv.sh .venv-oldest -e '.[test]' 'jax==$(OLDEST_JAX)' 'jaxlib==$(OLDEST_JAX)'
	@touch $@

# libtpu lies beside the environment, not in it: it looks for a TPU at every start of JAX.
test-topologies: .venv-tpu/.installed ## compile steps and kernels for TPUs that are not there
	PYTHONPATH=.venv-tpu .venv/bin/python -m pytest $(FAST) tests/topologies

.venv-tpu/.installed: .venv/.installed
	.venv/bin/python -m pip install -q --no-deps --target .venv-tpu libtpu
	@touch $@

lint: venv ## format, lint, types, floors
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/ty check
	.venv/bin/pyright
	.venv/bin/lint-imports

api: venv ## rewrite tests/public_api.txt after a deliberate change of the public face
	.venv/bin/python scripts/public_api.py > tests/public_api.txt

models: venv ## rewrite docs/models.md from the registry and the fixtures
	.venv/bin/python scripts/models_table.py > docs/models.md

clean: ## remove what make made, the environment and the demo model included
	rm -rf .venv .venv-* .demo .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
