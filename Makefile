# Everything a contributor types. Each target builds .venv first if it is missing or out of date.
#
# uv installs in seconds what takes pip minutes where the index brings PyTorch's CUDA packages (about 3 GB). On a machine
# without a GPU, point UV_INDEX to PyTorch's own CPU index to be spared them.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv demo surface test test-long test-strategies test-versions test-versions-smoke test-openshift-images test-s3 install-browser test-browser test-browser-core test-nfs install-images test-images test-images-core test-images-long test-cluster test-cluster-core test-cluster-long test-gpu check lint bench clean

# Every rank of every test is a new interpreter: modules are compiled once.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
INSTALL := $(BIN)/uv pip install --quiet --python
VERSIONS := .venv/versions
# A slower machine than a laptop is normal, and two test files at a time leave jobs half as fast.
export SAFEPOINT_TEST_PATIENCE ?= 2
PYTEST := $(BIN)/pytest
# A test that hangs ends its process (`tests/conftest.py`). A new process would run the same test again.
LANES := $(PYTEST) -n 2 --dist loadfile --max-worker-restart 0
EXTRAS := .[azure,dashboard,gcs,kubernetes,lightning,peft,sdk,torch,transformers,transparent,trl]

# These lanes start all programs of tests as new processes; the others copy them (`tests/support/copies`).
test-gpu test-images test-images-core test-long test-strategies test-versions test-versions-smoke: \
  export SAFEPOINT_TEST_TEMPLATE := 0

help: ## show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-26s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(INSTALLED) ## create .venv with Safepoint (editable), its extras and the development tools

# `pip check` fails when a dependency was satisfied by anything but what constraints.txt pins it to work with.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Safepoint needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt uv
	$(INSTALL) $(BIN)/python -c constraints.txt -e '$(EXTRAS)' --group dev
	$(BIN)/uv pip check --python $(BIN)/python
	rm -rf .venv/deepspeed
	$(INSTALL) $(BIN)/python -c constraints.txt --no-deps --target .venv/deepspeed --group deepspeed
	if command -v g++ >/dev/null; then $(BIN)/python -m tests.support.deepspeed; fi
	rm -rf .venv/bitsandbytes
	$(INSTALL) $(BIN)/python -c constraints.txt --no-deps --target .venv/bitsandbytes --group bitsandbytes
	touch $@

demo: $(INSTALLED) ## preempt a training run and prove that nothing was lost (about 3 minutes, no GPU)
	$(BIN)/python examples/demo.py

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

surface: $(INSTALLED) ## record what users rely on (tests/unit/surface.json), after an intended change of it
	$(BIN)/python -m tests.support.surface

check: lint ## formatting, lint, types, layers and the unit tests
	$(LANES) -m 'not ranks and not s3 and not cluster and not browser and not images and not long'

test: lint ## everything a change must pass: `check` and the tests with real ranks
	$(LANES) -m 'not s3 and not cluster and not browser and not images and not long'

test-s3: $(INSTALLED) ## the storage tests on real S3 servers: Ceph RGW, installed on Debian as root, and MinIO, built with Go
	if $(BIN)/python -m tests.support.ceph_rgw install; then $(LANES) -m 's3 and not minio and not long'; fi
	if $(BIN)/python -m tests.support.minio build; then $(LANES) -m 'minio and not long'; fi

install-browser: $(INSTALLED)
	$(INSTALL) $(BIN)/python -c constraints.txt --group browser
	$(BIN)/python -m tests.support.browser install

test-browser: $(INSTALLED) ## the dashboard and cells of a notebook in Debian's Chromium, with axe-core; as root (5 minutes)
	if $(MAKE) install-browser; then $(PYTEST) -n 0 -m browser tests/browser; fi

test-browser-core: $(INSTALLED) ## of these, the life of a job, the pages on a small screen, and the cells (2 minutes)
	if $(MAKE) install-browser; then $(PYTEST) -n 0 -m browser tests/browser \
	  -k 'life_of_a_job or (page_looks_well and small) or cells_look_well'; fi

test-nfs: $(INSTALLED) ## a folder on real NFS: Debian's kernel as a process, server and two clients; as root (2 minutes)
	if $(BIN)/python -m tests.support.nfs install; then $(PYTEST) -m long tests/attacks/test_nfs.py; fi

install-images: $(INSTALLED)
	$(BIN)/python -m tests.support.criu install

test-images: $(INSTALLED) ## process images of real processes, with CRIU from Debian unstable; as root (12 minutes)
	if $(MAKE) install-images; then $(PYTEST) -n 0 -m 'images and not long' tests/images; fi

test-images-core: $(INSTALLED) ## of these: frozen and restored bit for bit, whose an image is, damage and a full disk (3 minutes)
	if $(MAKE) install-images; then $(PYTEST) -n 0 -m 'images and not long' tests/images \
	  -k 'on_bit_for_bit or another_key or damaged or full_folder'; fi

test-images-long: $(INSTALLED) ## each way to freeze and restore, ten times (an hour)
	if $(MAKE) install-images; then $(PYTEST) -n 0 -m 'images and long' tests/images; fi

test-cluster: $(INSTALLED) ## jobs on a real Kubernetes, built with Go: Linux and root (half an hour to build it the first time)
	if $(BIN)/python -m tests.support.cluster build; then $(PYTEST) -m 'cluster and not long' tests/cluster; fi

test-cluster-long: $(INSTALLED) ## older releases of Trainer, each on a cluster of its own, and each fault ten times (2 hours)
	if $(BIN)/python -m tests.support.cluster build older; then $(PYTEST) -m 'cluster and long' tests/cluster; \
	  SAFEPOINT_TEST_TRIALS=10 $(PYTEST) tests/cluster/test_faults.py tests/cluster/test_two_nodes.py; fi

test-cluster-core: $(INSTALLED) ## of these, the life of a job: suspended, preempted, a pod deleted or evicted (6 minutes)
	if $(BIN)/python -m tests.support.cluster build; then $(PYTEST) -m 'cluster and not long' tests/cluster/test_life.py \
	  tests/cluster/test_faults.py -k 'is_suspended or preempted or deleted or evicted'; fi

test-gpu: $(INSTALLED) ## the tests that need a CUDA device; skipped without one (ten minutes)
	$(PYTEST) -n 0 -m gpu tests/gpu/test_device_copy.py tests/gpu/test_metric_reader.py tests/gpu/test_checkpoint_api.py \
	  tests/gpu/test_jobs.py
	$(PYTEST) -n 4 --dist load -m gpu tests/gpu/test_trainings.py

test-long: $(INSTALLED) ## 20 interruptions of two nodes in each pattern, 500 kills, and further cases (hours)
	$(PYTEST) -m 'long and not s3 and not cluster and not images' --deselect tests/ranks/test_nodes.py --deselect tests/ranks/test_strategies.py \
	  --deselect tests/ranks/test_zero_ranks.py
	SAFEPOINT_TEST_TRIALS=20 $(PYTEST) tests/ranks/test_nodes.py
	SAFEPOINT_TEST_KILLS=300 $(PYTEST) tests/storage/test_kills.py
	SAFEPOINT_TEST_SNAPSHOT_KILLS=200 $(PYTEST) tests/ranks/test_snapshot_kills.py
	if $(BIN)/python -m tests.support.ceph_rgw install; then $(PYTEST) -m 's3 and not minio and long'; fi
	if $(BIN)/python -m tests.support.minio build; then $(PYTEST) -m 'minio and long'; fi

test-strategies: $(INSTALLED) ## every strategy, interrupted in every way, all weights and adapters; ZeRO on other ranks
	$(PYTEST) tests/ranks/test_strategies.py tests/ranks/test_zero_ranks.py

# The sets of `make test-versions`: a file of pins in constraints/, or none for the newest releases. OpenShift AI's images
# have Python 3.12. PyTorch of the common index comes with its CUDA packages: several GB for each release.
SETS := oldest cuda-image rocm-image universal-image newest
PYTHON_OF_IMAGES ?= python3.12
TOOLS := torch numpy xxhash typer psutil transformers accelerate trl peft 'datasets>=4.0' 'lightning>=2.6,<3' \
  pip setuptools pytest pytest-timeout pytest-xdist hypothesis 'moto[server]' cryptography scikit-learn torchdata
MEET_FRAMEWORKS := tests/unit/training tests/unit/snapshot \
  tests/ranks/test_{equivalence,data_position,interruptions,lightning,session,strategies,trl}.py

# A pin of the set replaces that of constraints.txt.
PINS_OF_SET = awk -F'[=<>]' 'NR == FNR { print; set[$$1]; next } !($$1 in set)' constraints/$*.txt constraints.txt

# Safepoint itself is a path: nothing else that it requires is there.
$(SETS:%=$(VERSIONS)/%/.installed): $(VERSIONS)/%/.installed: pyproject.toml constraints.txt $(wildcard constraints/*.txt) | $(INSTALLED)
	rm -rf $(@D)
	$(BIN)/uv venv --quiet --python $(if $(findstring image,$*),$(PYTHON_OF_IMAGES),$(PYTHON)) $(@D)
	if [ -f constraints/$*.txt ]; then $(PINS_OF_SET); fi > $(@D)/constraints.txt
	$(INSTALL) $(@D)/bin/python -c $(@D)/constraints.txt $(TOOLS)
	$(INSTALL) $(@D)/bin/python -c $(@D)/constraints.txt --no-deps --target $(@D)/deepspeed deepspeed einops hjson msgpack ninja py-cpuinfo
	echo $(CURDIR)/src > $$($(@D)/bin/python -c 'import site; print(site.getsitepackages()[0])')/safepoint.pth
	touch $@

test-versions: $(SETS:%=test-set-%) ## what meets the frameworks, in each set of releases: oldest, newest, OpenShift AI's images

$(SETS:%=test-set-%): test-set-%: $(VERSIONS)/%/.installed
	$(VERSIONS)/$*/bin/python -m pip freeze | grep -E '^(accelerate|lightning|numpy|peft|torch|transformers|trl)=='
	$(VERSIONS)/$*/bin/python -m pytest -m 'not s3 and not cluster and not browser and not images and not long' $(MEET_FRAMEWORKS)

test-versions-smoke: $(VERSIONS)/oldest/.installed ## of these, a few with the oldest releases: units, two interruptions (4 minutes)
	$(VERSIONS)/oldest/bin/python -m pytest tests/unit/training/compatibility tests/unit/training/integrations tests/unit/snapshot/images
	$(VERSIONS)/oldest/bin/python -m pytest -m '' 'tests/ranks/test_strategies.py::test_interrupted_is_uninterrupted[ddp-full-signal]' \
	  'tests/ranks/test_strategies.py::test_interrupted_is_uninterrupted[fsdp1-full-signal]'

# The environments of `make test-openshift-images` have what a set pins, and nothing else but its requirements. aiobotocore, which
# s3fs requires, needs other releases of two packages than the tests do.
IMAGES := .venv/images
IMAGE_SETS := $(filter-out newest,$(SETS))

$(IMAGE_SETS:%=$(IMAGES)/%/.installed): $(IMAGES)/%/.installed: constraints/%.txt constraints.txt | $(INSTALLED)
	rm -rf $(@D)
	$(BIN)/uv venv --quiet --python $(if $(findstring image,$*),$(PYTHON_OF_IMAGES),$(PYTHON)) $(@D)
	$(PINS_OF_SET) | grep -vE '^(botocore|wrapt)==' > $(@D)/constraints.txt
	$(INSTALL) $(@D)/bin/python -c $(@D)/constraints.txt $$(grep -oE '^[^#]+==.+' $<)
	touch $@

test-openshift-images: $(IMAGE_SETS:%=$(IMAGES)/%/.installed) ## safepoint.pyz where only an image's packages are, and Red Hat's guides; Debian, root (20 minutes)
	rm -rf $(IMAGES)/guide
	$(BIN)/uv venv --quiet --python $(PYTHON) $(IMAGES)/guide
	$(BIN)/python -m hatchling build --target wheel --directory $(IMAGES)/guide/wheel
	$(INSTALL) $(IMAGES)/guide/bin/python -c constraints.txt "$$(echo $(IMAGES)/guide/wheel/*.whl)[sdk,trl]"
	if $(BIN)/python -m tests.support.ceph_rgw install; then \
	  $(PYTEST) tests/ranks/test_images.py tests/ranks/test_guides_of_red_hat.py; fi

bench: $(INSTALLED) ## install the benchmarks' peers and run every benchmark
	$(INSTALL) $(BIN)/python -c constraints.txt --group bench
	for benchmark in benchmarks/bench_*.py; do $(BIN)/python "$$benchmark"; done

clean: ## remove outputs and caches; .venv stays
	rm -rf demo-output build dist .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +
