#!/usr/bin/env bash
# Builds the program for the image, without the tables for unwinding and their index: a tenth of it.
set -euo pipefail
cd "$(dirname "$0")/.."
exec cargo rustc --profile image --locked --no-default-features --bin flux-distribute "$@" -- \
    -C link-arg=-Wl,--no-eh-frame-hdr -C "link-arg=-Wl,-T,$PWD/scripts/image-binary.ld"
