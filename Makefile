# `make demo` hears it speak, `make test` proves it; both install what they need first. `make help` lists the rest.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help install demo serve test test-long lint bench clean

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# The interpreter: 3.11 is the one the tests run on.
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null && echo $$p && break; done)
# Where the CPU build of torch comes from. Another index gives another build, e.g. https://download.pytorch.org/whl/cu130
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
EXTRAS := client,server,triton,build,dev

# pip's own lines, less the noise, with the sum of what was downloaded.
define PIP_PROGRESS
/^ *Downloading / {
	size = $$(NF-1); unit = $$NF; gsub(/[()]/, "", size); gsub(/[()]/, "", unit)
	megabytes = size * (unit == "GB" ? 1000 : unit == "MB" ? 1 : unit == "kB" ? 0.001 : 0.000001); total += megabytes
	if (megabytes >= 1) { sub(/^ */, ""); print "  " $$0; fflush() }
}
/^(Installing collected|ERROR|WARNING: (Retry|Could|Skip)|      ?[Ee]rror)/ { print "  " substr($$0, 1, 100); fflush() }
END { printf "  downloaded %.0f MB\n", total }
endef
export PIP_PROGRESS

help:
	@echo "make install    .venv with everything a CPU needs (PYTHON=$(PYTHON), TORCH_INDEX=$(TORCH_INDEX))"
	@echo "make demo       synthesise a sentence, read it back, ask a spoken question: out/demo.wav"
	@echo "make serve      hibari, whisper, smollm2 and voice_chat behind Triton and the OpenAI routes"
	@echo "make test       the tests; make test-long: the repetitions; make lint: ruff and mypy; make bench: the figures"

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@if [ -z "$(PYTHON)" ]; then echo "This machine lacks Python 3.11 or 3.12:" \
		"apt-get install -y python3.11 python3.11-venv libpython3.11" >&2; exit 1; fi
	@$(PYTHON) client/omni_client/launch/machine.py
	@test -x $(BIN)/python || { echo "Making $(VENV) with $$($(PYTHON) -V)"; $(PYTHON) -m venv $(VENV); }
	@# Without compiling: what is used is compiled on first import, which is a fraction of it.
	@# torch alone and first: only this page is asked of TORCH_INDEX, and one that cannot be reached costs seconds.
	@if ! $(BIN)/python -c 'import torch' 2>/dev/null; then echo "Installing torch from $(TORCH_INDEX)"; \
		$(BIN)/pip install --no-compile --no-deps --retries 1 --timeout 15 --extra-index-url $(TORCH_INDEX) -c constraints.txt torch 2>&1 \
		| awk "$$PIP_PROGRESS"; fi
	@echo "Installing triton-omni[$(EXTRAS)]"
	@$(BIN)/pip install --no-compile -c constraints.txt -e '.[$(EXTRAS)]' 2>&1 | awk "$$PIP_PROGRESS"
	@$(BIN)/python -m omni_build.server wrapper >/dev/null
	@echo "Installed: $$(du -sh $(VENV) | cut -f1) in $(VENV), torch $$($(BIN)/pip show torch 2>/dev/null | sed -n 's/^Version: //p')"
	@touch $@

demo: $(STAMP)
	@$(BIN)/triton-omni demo --out out

serve: $(STAMP)
	@exec $(BIN)/triton-omni serve hibari whisper smollm2 voice_chat

test: $(STAMP)
	$(BIN)/pytest -m "not long"

# pytest says 5 when it finds nothing to run.
test-long: $(STAMP)
	$(BIN)/pytest -m long || [ $$? -eq 5 ]

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/triton-omni bench

clean:
	rm -rf $(VENV) out dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
