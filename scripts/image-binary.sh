#!/usr/bin/env bash
# Builds the program for the image. The tables for unwinding would be a tenth of it; image-binary.ld says why they are left out.
# Relative relocations are packed: a few kB in place of 700 kB, which each process would read at its start and keep in memory.
set -euo pipefail
cd "$(dirname "$0")/.."
exec cargo rustc --profile image --locked --no-default-features --bin flux-distribute "$@" -- \
    -C link-arg=-Wl,--no-eh-frame-hdr -C "link-arg=-Wl,-T,$PWD/scripts/image-binary.ld" -C link-arg=-Wl,-z,pack-relative-relocs
