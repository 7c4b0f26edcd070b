#!/usr/bin/env bash
# Builds the program for the image. The index of its unwind tables is left out: a panic ends this program, and nothing else reads it.
set -euo pipefail
cd "$(dirname "$0")/.."
exec cargo rustc --profile image --locked --no-default-features --bin flux-distribute "$@" -- -C link-arg=-Wl,--no-eh-frame-hdr
