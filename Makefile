# Everything is set up on the first call of any target; nothing is installed outside .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SET_UP := $(VENV)/.set-up

.PHONY: demo requirements test test-package compare-lm-eval test-newest test-redis-py test-sanitizers test-engines test-images test-update try-changes wheel states compat check format model bench bench-peers bench-batch bench-cancel bench-cancel-at-server bench-pairs-at-server bench-drafting bench-formats bench-gateway bench-gpu bench-import bench-sampling bench-grammar bench-lock bench-long-queue bench-model-swap bench-pairs bench-quality bench-redis-memory bench-scaling-out chaos chaos-cluster chaos-swapping fuzz soak clean

demo: $(SET_UP)
	@$(BIN)/promptq demo

# In four processes, as many tests wait: ARGS="-n 0" keeps it to one. A run takes a sample of the
# matrices of tests that take long: ARGS=--whole takes all.
test: $(SET_UP)
	@$(BIN)/python -m pytest $(ARGS)

# The wheel, in dist/, made of the sdist: make wheel DIST=elsewhere. auditwheel says for which systems
# its native code is; torch brings the OpenMP runtime. There is nothing to say of a wheel without it.
DIST := dist
wheel: $(SET_UP)
	@rm -rf $(DIST)
	@$(BIN)/python -m build --outdir $(DIST)
	@for made in $(DIST)/*-linux_*.whl; do test ! -e "$$made" || \
		{ PATH="$(BIN):$$PATH" $(BIN)/auditwheel repair --exclude libgomp.so.1 --wheel-dir $(DIST) "$$made" && \
		rm "$$made"; }; done

# The package as strangers meet it: the wheel in an environment of its own, in an empty folder.
test-package: $(SET_UP)
	@$(BIN)/python -m tests.package $(ARGS)

# The same with the newest version of everything but torch.
test-newest: $(SET_UP)
	@$(BIN)/python -m tests.package --newest

# What lm-eval measures through the gateway, and what it measures of the model itself.
compare-lm-eval: $(SET_UP)
	@$(BIN)/python -m tests.scoring $(ARGS)

# The client on old and new versions of redis-py: ARGS="5.2.1 6.4.0" for some of them.
test-redis-py: $(SET_UP)
	@$(BIN)/python -m tests.package.redis_py $(ARGS)

# The real inference servers behind workers (make bench-peers builds them), and faults of all sides.
test-engines: bench-peers
	@PROMPTQ_TEST_ENGINES=1 $(BIN)/python -m pytest -n 0 tests/engines tests/worker/test_engine_contract.py $(ARGS)
	@$(BIN)/python -m tests.engines.chaos stand-in --worker-kills 200 --server-kills 200
	@$(BIN)/python -m tests.engines.chaos llama.cpp --worker-kills 15 --server-kills 15
	@$(BIN)/python -m tests.engines.chaos vllm --worker-kills 5 --server-kills 5

# Pins what the images install, with hashes, to the versions of constraints.txt. It needs uv.
requirements:
	@folder=$$(mktemp -d) && uv pip compile pyproject.toml --quiet --extra all --constraint constraints.txt \
	  --python-version 3.11.2 --python-platform x86_64-manylinux_2_36 --only-binary :all: \
	  --output-file "$$folder/pylock.toml" && $(BIN)/python deploy/images/lock.py "$$folder/pylock.toml" && rm -r "$$folder"

# The image for CPUs: built, serving, stopped under load. It needs podman, buildah, mmdebstrap, iptables.
test-images: wheel
	@$(BIN)/python -m tests.deploy.images $(ARGS)

# The native code, built with the address and undefined-behaviour sanitizers and without a warning.
test-sanitizers: $(SET_UP)
	@$(BIN)/python -m tests.worker.engine.native.sanitizers $(ARGS)

# The last release and this one on the same queues, under faults, updated and rolled back.
test-update: $(SET_UP)
	@$(BIN)/python -m tests.chaos --beside-last-release --seconds 600 $(ARGS)

# The example changes of docs/design/cost-of-a-change.md, applied to a copy of the tree and tested there.
try-changes: $(SET_UP)
	@$(BIN)/python -m tests.docs.changes $(ARGS)

# Every state that the queue's scripts can reach in small worlds; docs/reliability.md says which.
states: $(SET_UP)
	@$(BIN)/python -m tests.shared.states $(ARGS)

# Other people's programs against a gateway, and docs/compatibility.md: ARGS="openai litellm" for some.
# It installs each of them below .cache, from the registries of Python and Node.
compat: $(SET_UP)
	@$(BIN)/python -m tests.compat $(ARGS)

check: $(SET_UP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

format: $(SET_UP)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

# Train the shipped model anew, from the text that its grammar writes.
model: $(SET_UP)
	@$(BIN)/python -m training.train

# Side by side with other engines: make bench ARGS="--quick". Peers that are not built are named.
bench: $(SET_UP)
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[bench]'
	@$(BIN)/python -m benchmarks $(ARGS)

# The other engines, each in an environment of its own under benchmarks/.peers.
bench-peers: $(SET_UP)
	@$(BIN)/python -m benchmarks.peers $(ARGS)

# A batch of 50,000 lines, and one of few large lines: time, and memory of gateway and jobs.
bench-batch: $(SET_UP)
	@$(BIN)/python -m benchmarks.batch $(ARGS)

# How long a cancelled request keeps its KV blocks.
bench-cancel: $(SET_UP)
	@$(BIN)/python -m benchmarks.engine.cancel

# The same at vLLM's and llama.cpp's servers, behind a worker.
bench-cancel-at-server: bench-peers
	@$(BIN)/python -m benchmarks.engine.cancel_at_server $(ARGS)

# vLLM's server alone and behind a worker, in turns.
bench-pairs-at-server: bench-peers
	@$(BIN)/python -m benchmarks.engine.pairs_at_server $(ARGS)

# What drafting gains where a text repeats itself, and costs where it does not.
bench-drafting: $(SET_UP)
	@$(BIN)/python -m benchmarks.engine.drafting $(ARGS)

# Formats of weights, ours and llama.cpp's, in turns: ARGS="--model 54m" for a smaller model.
bench-formats: $(SET_UP)
	@$(BIN)/python -m benchmarks.engine.formats $(ARGS)

# What a model loses to each format: perplexity, and the greedy tokens that stay the same.
bench-quality: $(SET_UP)
	@$(BIN)/python -m benchmarks.engine.quality $(ARGS)

# What the gateway adds to a token, at 200 and at 2,000 streams: ARGS="--quick" tries it.
bench-gateway: $(SET_UP)
	@$(BIN)/python -m benchmarks.gateway $(ARGS)

# On a GPU: is it right, and how far from what the device allows? ARGS="--tiny --device cpu" tries it.
bench-gpu: $(SET_UP)
	@$(BIN)/python -m benchmarks.gpu $(ARGS)

# What a program pays that imports the client.
bench-import: $(SET_UP)
	@$(BIN)/python -m benchmarks.client_import $(ARGS)

# What sampling takes of a decode step.
bench-sampling: $(SET_UP)
	@$(BIN)/python -m benchmarks.engine.sampling $(ARGS)

# What grammars (JSON schemas, calls of tools) cost a step.
bench-grammar: $(SET_UP)
	@$(BIN)/python -m benchmarks.engine.grammar_masks

# What sharing an interpreter with the publishing side costs the engine.
bench-lock: $(SET_UP)
	@OMP_WAIT_POLICY=passive OMP_PLACES=cores OMP_PROC_BIND=close \
		$(BIN)/python -m benchmarks.engine.interpreter_lock $(ARGS)

# This checkout against another one, in alternating pairs: ARGS="../earlier".
bench-pairs: $(SET_UP)
	@$(BIN)/python -m benchmarks.pairs $(ARGS)

# Two workers over one, each with the same share of the machine.
bench-scaling-out: $(SET_UP)
	@$(BIN)/python -m benchmarks.queue.scaling_out $(ARGS)

# An urgent request behind a million that wait, against one behind 2,000.
bench-long-queue: $(SET_UP)
	@$(BIN)/python -m benchmarks.queue.long_queue $(ARGS)

# How long no token comes while two models change places.
bench-model-swap: $(SET_UP)
	@$(BIN)/python -m benchmarks.model_swap $(ARGS)

# Bytes of the server for a waiting request and a token.
bench-redis-memory: $(SET_UP)
	@$(BIN)/python -m benchmarks.queue.redis_memory $(ARGS)

# Real processes under seeded faults, and an audit: make chaos ARGS="--seconds 3600 --seed 7".
chaos: $(SET_UP)
	@$(BIN)/python -m tests.chaos $(ARGS)

# The same on a Redis Cluster, whose primaries die and whose slots move.
chaos-cluster: $(SET_UP)
	@$(BIN)/python -m tests.chaos --cluster valkey --seconds 1200 $(ARGS)

# Streams of two models that change places on one worker, whose processes die.
chaos-swapping: $(SET_UP)
	@$(BIN)/python -m tests.worker.swapping.chaos $(ARGS)

# Malformed requests against a running worker and a gateway: make fuzz ARGS="--count 100000 --seed 7".
fuzz: $(SET_UP)
	@$(BIN)/python -m tests.fuzz $(ARGS)

# Steady load: are memory and latency flat? make soak ARGS="--seconds 3600".
soak: $(SET_UP)
	@$(BIN)/python -m tests.soak $(ARGS)

clean:
	rm -rf $(VENV) dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .cache

$(SET_UP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "promptq needs Python 3.11 or later; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.12"; exit 1; }
	@echo "Setting up $(VENV), once. Stage 1 of 3: an empty environment"
	@$(PYTHON) -m venv $(VENV)
	@echo "Stage 2 of 3: packages, 2.7 GB once installed; with PyTorch for CUDA, pip's default, 8 GB"
	@# At a terminal pip shows each package with its size and a bar; else only what goes wrong.
	@quiet=--quiet; test ! -t 1 || quiet=; \
		$(BIN)/python -m pip install $$quiet --constraint constraints.txt --editable '.[dev]'
	@echo "Stage 3 of 3: done, $$(du -sh $(VENV) | cut -f1) in $(VENV)"
	@touch $@
