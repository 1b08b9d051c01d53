# `make demo` and `make test` are all a newcomer needs. Both create the environment first.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
SPEC   := model_specs/tiny/gemma4_tiny.yaml
ARCH   ?= sm_90a

.PHONY: demo test gpu-bundle gpu-test lint format docs clean

demo: $(READY)
	@$(BIN)/memra-compile $(SPEC) -o build/gemma4_tiny.cpu.memra
	@$(BIN)/memra-run build/gemma4_tiny.cpu.memra --stats \
	  --weights model_specs/tiny/gemma4-tiny-q8_0.gguf \
	  --draft model_specs/tiny/gemma4-tiny-assistant-q8_0.gguf \
	  --prompt "The :mod:\`json\` module" --max-new 96
	@$(BIN)/memra-check build/gemma4_tiny.cpu.memra --quick \
	  --weights model_specs/tiny/gemma4-tiny-q8_0.gguf \
	  --draft model_specs/tiny/gemma4-tiny-assistant-q8_0.gguf

test: $(READY)
	$(BIN)/python -m pytest -q -n auto --dist loadfile -m "not alone"
	$(BIN)/python -m pytest -q -m alone

# What the tests of the pair need on a GPU machine, into build/gpu. Needs no GPU.
gpu-bundle: $(READY)
	$(BIN)/python tests/gpu/build.py --arch $(ARCH)

gpu-test: $(READY)
	$(BIN)/python -m pytest -q tests/gpu -m gpu

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)
	$(BIN)/python -m memra_compiler.spec.document docs/spec.md

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; \
	  sys.exit("memra needs Python 3.10 or newer, this is %d.%d" % v[:2]) if v < (3, 10) else 0'
	@command -v cc gcc clang ld >/dev/null || { \
	  echo "memra needs a linker to compile for the CPU: install gcc (Debian, Ubuntu: apt install gcc)" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install -q --disable-pip-version-check -e ".[test]"
	@touch $@

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache *.egg-info
