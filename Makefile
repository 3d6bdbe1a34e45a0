# Everything a fresh machine needs: Python 3.10 or newer, make and gcc; for test-page, chromium or Debian's apt-get.
PYTHON ?= python3
TORCH := 2.13.0
VERSIONS := 5.24.0 4.57.6 5.0.0
ENVS := .venv
READY := $(VERSIONS:%=$(ENVS)/%/ready) $(ENVS)/virtual_npu/ready $(ENVS)/hub_kernels/ready
# what is never imported need not be compiled
INSTALL := -m pip install -q --no-compile
# more than two workers a machine of two cores does not feed; the commands come first, whose few tests are the slowest
PYTEST := -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder
# a patch proves what is loaded: what loads many models is run in processes of its own, or each later patch takes long
SWEEP := tests/kernels/test_every_norm.py tests/kernels/test_every_mlp.py tests/kernels/test_every_rotary.py \
         tests/kernels/test_every_experts.py
NPU_SWEEP := tests/virtual_npu/test_every_norm.py tests/virtual_npu/test_every_rotary.py \
             tests/virtual_npu/test_moe_every_experts.py tests/virtual_npu/test_swiglu_every_mlp.py
# environments of their own, or a browser
APART := tests/packaging tests/virtual_npu tests/hub_kernels tests/page
FAMILIES := tests/models/test_families.py tests/models/test_moe_families.py
MODES := tests/models/test_modes.py tests/models/test_graphs.py tests/verification
# the majors are tested whole; of the version between what transformers has a part in: its import, its classes, the
# page about it, some families and all with experts
WHOLE-5.24.0 := tests
WHOLE-4.57.6 := tests
WHOLE-5.0.0 := tests/reach tests/integration tests/kernels tests/cli/test_coverage_whole.py
SOME-5.0.0 := -k "moe_families or llama or qwen3 or glm4 or phi3 or gemma3 or deepseek_v3 or gpt_oss or t5"
OTHERS := $(APART) tests/models tests/verification tests/analysis $(SWEEP)

.PHONY: demo test test-virtual-npu test-packaging test-hub-kernels test-page lint verify-all bench bench-launches clean \
        coverage-docs environments $(VERSIONS:%=test-%)

demo: $(ENVS)/5.24.0/ready
	$(ENVS)/5.24.0/bin/npu-autopatch demo

test: environments lint $(VERSIONS:%=test-%) test-packaging test-hub-kernels test-page test-virtual-npu

# two at a time: pip uses one core
environments:
	$(MAKE) -j 2 $(READY)

# one environment a version of transformers, the project installed as a user would for development
$(ENVS)/%/ready: pyproject.toml Makefile
	$(PYTHON) -m venv $(ENVS)/$*
	$(ENVS)/$*/bin/python $(INSTALL) torch==$(TORCH) transformers==$* -e '.[test]'
	touch $@

# the real torch_npu: without the stand-in for CANN that the tests build, even `import torch` fails here
$(ENVS)/virtual_npu/ready: pyproject.toml Makefile
	$(PYTHON) -m venv $(ENVS)/virtual_npu
	$(ENVS)/virtual_npu/bin/python $(INSTALL) torch==$(TORCH) transformers==5.24.0 pyyaml -e '.[test]'
	$(ENVS)/virtual_npu/bin/python $(INSTALL) --no-deps torch_npu==$(TORCH)
	touch $@

# a transformers that accepts a version of the package kernels from the index
$(ENVS)/hub_kernels/ready: pyproject.toml Makefile
	$(PYTHON) -m venv $(ENVS)/hub_kernels
	$(ENVS)/hub_kernels/bin/python $(INSTALL) torch==$(TORCH) transformers==5.12.1 kernels==0.13.0 -e '.[test]'
	touch $@

# the workers are as many as the cores: threads of theirs would only wait for each other
$(VERSIONS:%=test-%) test-packaging test-virtual-npu: export OMP_NUM_THREADS = 1
$(VERSIONS:%=test-%): test-%: $(ENVS)/%/ready
	$(ENVS)/$*/bin/python $(PYTEST) $(WHOLE-$*) $(OTHERS:%=--ignore %)
	$(ENVS)/$*/bin/python $(PYTEST) --dist loadgroup $(FAMILIES) $(SOME-$*)
	$(ENVS)/$*/bin/python $(PYTEST) $(MODES) $(SOME-$*)
	$(ENVS)/$*/bin/python $(PYTEST) $(SWEEP)
	$(if $(filter tests,$(WHOLE-$*)),$(ENVS)/$*/bin/python $(PYTEST) tests/analysis)

test-packaging: $(ENVS)/5.24.0/ready
	$(ENVS)/5.24.0/bin/python $(PYTEST) tests/packaging

test-hub-kernels: $(ENVS)/hub_kernels/ready
	$(ENVS)/hub_kernels/bin/python -m pytest -q tests/hub_kernels

# in a real browser
test-page: $(ENVS)/5.24.0/ready
	command -v chromium && command -v chromedriver || \
	    { apt-get update -q && apt-get install -q -y --no-install-recommends chromium chromium-driver; }
	$(ENVS)/5.24.0/bin/python $(PYTEST) tests/page

test-virtual-npu: export NPU_AUTOPATCH_REQUIRE_VIRTUAL_NPU = 1
test-virtual-npu: $(ENVS)/virtual_npu/ready
	$(ENVS)/virtual_npu/bin/python $(PYTEST) tests/virtual_npu $(NPU_SWEEP:%=--ignore %)
	$(ENVS)/virtual_npu/bin/python $(PYTEST) $(NPU_SWEEP)

lint: $(ENVS)/5.24.0/ready
	$(ENVS)/5.24.0/bin/ruff check .
	$(ENVS)/5.24.0/bin/ruff format --check .
	$(ENVS)/5.24.0/bin/mypy

# every model type, which takes long; the numbers are how many have to pass
verify-all: verify-5.24.0 verify-4.57.6
verify-5.24.0 verify-4.57.6: export OMP_NUM_THREADS = 1
verify-5.24.0: LEAST := 100
verify-4.57.6: LEAST := 60
verify-5.24.0 verify-4.57.6: verify-%: $(ENVS)/%/ready
	$(ENVS)/$*/bin/python -m tests.verification.sweep $(LEAST)

bench: $(ENVS)/5.24.0/ready
	$(ENVS)/5.24.0/bin/python -m benchmarks

bench-launches: $(ENVS)/virtual_npu/ready
	$(ENVS)/virtual_npu/bin/python -W ignore -m benchmarks.launches

# what is patched in each version; the tests of a version tell when its part is stale
coverage-docs: $(VERSIONS:%=$(ENVS)/%/ready)
	mkdir -p build docs
	for version in 5.0.0 4.57.6; do \
	    $(ENVS)/$$version/bin/npu-autopatch coverage --backend emulate --json > build/coverage-$$version.json || exit 1; \
	done
	$(ENVS)/5.24.0/bin/npu-autopatch coverage --backend emulate \
	    --markdown build/coverage-5.0.0.json build/coverage-4.57.6.json > build/coverage.md
	mv build/coverage.md docs/coverage.md

clean:
	rm -rf $(ENVS) build dist
