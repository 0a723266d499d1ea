# make train    builds what this machine can run, then trains a language model on real text: 3 minutes on 2 CPU cores
# make test     builds all that it can compile, then: does it work here? Every op's law, kernels on the CPU, examples
#               ARGS=--full adds sanitizers, random cases, static checks; ARGS=--slow leaves nothing out
#
# With a virtual environment active, both use it; otherwise they make .venv. A torch >= 2.11 that is there is kept.
#   TORCH=      what to give pip where torch is missing        TORCH=torch==2.11.0
#   PIP_ARGS=   more arguments for pip                         PIP_ARGS='--index-url https://...'
#   ARGS=       arguments of the training script or of pytest  make train ARGS='--preset gpt2-124m'
#   PROCESSES=  of the tests, at the same time (3)             make test PROCESSES=8
TORCH ?= torch==2.13.0
PIP_ARGS ?=
ARGS ?=
PYTHON ?= python3
PROCESSES ?= 3# one more than two cores: ranks and programs wait for each other

# Where ccache is installed, it compiles.
ifneq ($(shell command -v ccache),)
export CMAKE_CXX_COMPILER_LAUNCHER ?= ccache
export CMAKE_CUDA_COMPILER_LAUNCHER ?= ccache
endif

ENV := $(or $(VIRTUAL_ENV),$(CONDA_PREFIX),.venv)# a relative one: make takes no spaces in the names of its targets
PY := $(ENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
STAMPS := $(ENV)/.warpsmith
# What building and training need beside torch; their versions stand in requirements-dev.txt, like all others.
NEEDED := scikit-build-core pybind11 cmake ninja numpy safetensors tqdm matplotlib
SOURCES := $(shell find csrc build_backend python -type f -not -name '*.pyc') CMakeLists.txt pyproject.toml

.PHONY: train test lint docs sim soak clean
.DELETE_ON_ERROR:

# Without a GPU, training needs the CPU library alone. One of two stamps says what is installed: `package`, built for
# all that can be compiled, or `package-cpu`.
GPU_IS_VISIBLE = $(shell nvidia-smi -L 2>/dev/null | grep -q ^GPU && echo yes)
TO_TRAIN = $(if $(GPU_IS_VISIBLE)$(wildcard $(STAMPS)/package),package,package-cpu)

train: $(STAMPS)/$(TO_TRAIN)
	$(PY) examples/train_gpt.py $(ARGS)

test: $(STAMPS)/tools $(STAMPS)/package
	$(PY) -m pytest -n $(PROCESSES) --dist loadgroup --no-loadscope-reorder $(ARGS)

# Kernels on the CPU: make sim OP=norm. Of a family the law, and what C++ asks beside it; else all that C++ asks
sim: $(STAMPS)/tools $(if $(OP),$(STAMPS)/package)
	$(if $(wildcard tests/ops/test_$(OP)*.py),$(if $(OP),$(PY) -m pytest --sim -q -k sim- tests/ops/test_$(OP)*.py))
	$(PY) tools/sim/run.py $(if $(OP),--op $(OP)) $(ARGS)

# Kills training jobs 1,200 times, and writes the table of docs/soak.md. Fewer: make soak ARGS='--kills 100 --deaths 24'
soak: $(STAMPS)/tools $(STAMPS)/$(TO_TRAIN)
	OMP_NUM_THREADS=1 $(PY) tools/soak/run.py $(or $(ARGS),--write)

lint: $(STAMPS)/tools
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	git ls-files '*.cpp' '*.h' '*.cu' '*.cuh' | xargs $(ENV)/bin/clang-format --dry-run -Werror

docs: $(STAMPS)/tools $(STAMPS)/package
	$(PY) -m sphinx -q -W -b html docs docs/_build/html

$(STAMPS)/environment:
	test -x $(PY) || $(PYTHON) -m venv $(ENV)
	mkdir -p $(STAMPS) && touch $@

$(STAMPS)/torch: | $(STAMPS)/environment
	$(PY) -c "import torch; v = torch.__version__.split('.'); assert (int(v[0]), int(v[1])) >= (2, 11)" 2>/dev/null \
	  || $(PIP) install $(PIP_ARGS) '$(TORCH)'
	touch $@

$(STAMPS)/needed: requirements-dev.txt | $(STAMPS)/torch
	$(PIP) install -q $(PIP_ARGS) -c requirements-dev.txt $(NEEDED)
	touch $@

$(STAMPS)/tools: requirements-dev.txt | $(STAMPS)/needed
	$(PIP) install -q $(PIP_ARGS) -r requirements-dev.txt
	touch $@

# Built against the torch of the environment, without isolation: nothing is downloaded and nothing is compiled twice.
INSTALL = $(PIP) install -q --no-build-isolation --no-deps --force-reinstall

$(STAMPS)/package: $(STAMPS)/needed $(SOURCES)
	@echo "building and installing warpsmith (with a CUDA compiler about 8 minutes of one core the first time)"
	$(INSTALL) .
	rm -f $(STAMPS)/package-cpu
	touch $@

# In a build folder of its own: the other one keeps what it has compiled.
$(STAMPS)/package-cpu: $(STAMPS)/needed $(SOURCES)
	@echo "no GPU is visible: building the CPU library alone ('make test' and 'pip install .' build CUDA where nvcc is)"
	$(INSTALL) --config-settings=cmake.define.WARPSMITH_CUDA=OFF --config-settings=build-dir=build/cpu .
	rm -f $(STAMPS)/package
	touch $@

clean:
	rm -rf build dist .venv docs/_build .pytest_cache .mypy_cache .ruff_cache
