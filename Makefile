# `make help` lists the targets.

VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
# The image to make, push and deploy.
IMAGE ?= localhost/flux-distribute:$(VERSION)

# Where rustup puts cargo.
export PATH := $(PATH):$(HOME)/.cargo/bin

.PHONY: help setup build image-binary test chaos chaos-long bench lint licences image push demo demo-down kind-test deploy undeploy manifests clean

help: ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-10s  %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## Install what building and testing need (the others do this first)
	@scripts/setup.sh

build: setup ## The static binary, with local mode: target/<host>/release/flux-distribute
	cargo build --release --locked

# The image's binary: without local mode, its API server, and the switches of tests.
image-binary: setup
	scripts/image-binary.sh

test: setup ## All tests, on a kind cluster too where Docker and kind are
	scripts/test.sh

chaos: setup ## Break things on purpose while a job runs, for up to an hour; TABLE=FILE for the results
	FLUX_DISTRIBUTE_CHAOS=1 FLUX_DISTRIBUTE_CHAOS_TABLE=$(TABLE) scripts/test.sh --profile chaos --test chaos

chaos-long: setup ## The same, five times as often
	FLUX_DISTRIBUTE_CHAOS=long FLUX_DISTRIBUTE_CHAOS_TABLE=$(TABLE) scripts/test.sh --profile chaos --test chaos

bench: setup ## What many nodes cost, into docs/measured.md if all of it ran, and target/bench.json (as root; scripts/bench.py has the settings); NODES="10 100"
	scripts/bench.py

lint: setup ## Format, clippy, links in the sources' documentation
	cargo fmt --check
	cargo clippy --workspace --all-targets --locked -- -D warnings
	RUSTDOCFLAGS="-D rustdoc::broken_intra_doc_links" cargo doc --workspace --locked --no-deps

licences: setup ## Licences and sources of all crates (deny.toml)
	scripts/deny.sh

# What can't be pushed shows before anything is built.
need_docker = docker info >/dev/null 2>&1 || { echo "there is no Docker daemon: install or start Docker, or load the file of \`make image\` by hand" >&2; exit 2; }

image: ## The container image, IMAGE=…: by Docker, or without it as target/image.tar
	@$(if $(filter push,$(MAKECMDGOALS)),$(need_docker);) if docker info >/dev/null 2>&1; then \
		docker build -f docker/Dockerfile -t $(IMAGE) .; \
	else \
		$(MAKE) image-binary && IMAGE=$(IMAGE) scripts/image.sh target/image.tar; \
	fi

push: ## Make and push IMAGE=…
	@$(need_docker)
	$(MAKE) image
	docker push $(IMAGE)

demo: ## Four simulated nodes that are one Flux instance, a job and pods; BUNDLE=…, CHANNEL=…, FLUX=none|required, BINARY=…
	@scripts/demo.sh

demo-down: ## Take the demo down
	scripts/demo.sh down

kind-test: ## The main job on a kind cluster with 4 workers
	scripts/kind-test.sh

deploy: ## Put IMAGE=… on the cluster that kubectl speaks to
	scripts/deploy.sh up $(IMAGE)

undeploy: ## Clean every host, then take everything off the cluster
	scripts/deploy.sh down

manifests: setup ## Make deploy/daemonset-installer.yaml, deploy/chart, docs/reference.md and more from deploy/parts and the types
	UPDATE_MANIFESTS=1 cargo test --quiet --locked --test crds --test monitoring

clean: ## Remove what was built
	cargo clean
