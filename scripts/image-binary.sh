#!/usr/bin/env bash
# Builds the program for the image. The tables for unwinding would be a tenth of it; image-binary.ld says why they are left out.
set -euo pipefail
cd "$(dirname "$0")/.."

# Relative relocations are packed: a few kB in place of 700 kB, which each process would read at its start and keep in memory. The program's own libc
# unpacks them, so an older one would crash at the first instruction: glibc does since 2.36, and musl since 1.2.5, which Rust brings since 1.93.
case $(rustc --print host-tuple) in
    *-gnu) libc=$(getconf GNU_LIBC_VERSION) since=36 ;;
    *) libc=$(rustc --version) since=93 ;;
esac
minor=${libc#*.}
pack=()
[ "${minor%%[!0-9]*}" -lt "$since" ] || pack=(-C link-arg=-Wl,-z,pack-relative-relocs)

exec cargo rustc --profile image --locked --no-default-features --bin flux-distribute "$@" -- \
    -C link-arg=-Wl,--no-eh-frame-hdr -C "link-arg=-Wl,-T,$PWD/scripts/image-binary.ld" "${pack[@]}"
