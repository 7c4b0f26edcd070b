#!/usr/bin/env bash
# Installs what building and testing need and this machine lacks. Says what it installs; does nothing where all is there.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { echo "setup: $*"; }
root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi; }

# Debian's name of each package, and the file or program that shows it is there.
missing=()
need() { # PACKAGE PROGRAM
    command -v "$2" >/dev/null || missing+=("$1")
}
need gcc gcc
need make make
need pkg-config pkg-config
need python3 python3
need binutils readelf
[ -s /etc/ssl/certs/ca-certificates.crt ] || missing+=(ca-certificates)
[ -e /usr/include/stdlib.h ] || missing+=(libc6-dev)

# cargo comes by rustup; the distribution's own is too old for this crate.
export PATH="$PATH:$HOME/.cargo/bin"
if ! command -v cargo >/dev/null && ! command -v rustup >/dev/null; then
    missing+=(rustup)
fi

if [ ${#missing[@]} != 0 ]; then
    if [ "$(id -u)" != 0 ] && ! command -v sudo >/dev/null; then
        say "installing ${missing[*]} needs root, and there is no sudo: run this as root, or install them first" >&2
        exit 1
    fi
    if ! command -v apt-get >/dev/null; then
        say "install these first (names as in Debian): ${missing[*]}" >&2
        exit 1
    fi
    say "installing ${missing[*]} by apt-get"
    root apt-get -q -o Dpkg::Use-Pty=0 update >/dev/null
    if [[ " ${missing[*]} " == *" rustup "* ]] && [ -z "$(apt-cache --names-only search '^rustup$')" ]; then
        say "this release has no package rustup: install Rust from https://rustup.rs, then run this again" >&2
        exit 1
    fi
    DEBIAN_FRONTEND=noninteractive root apt-get -q -o Dpkg::Use-Pty=0 install --yes --no-install-recommends "${missing[@]}" >/dev/null
fi

if command -v rustup >/dev/null && ! cargo --version >/dev/null 2>&1; then
    say "installing the stable Rust toolchain by rustup"
    rustup toolchain install stable --profile minimal --component clippy --component rustfmt
    rustup default stable
fi

wanted=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
found=$(cargo --version | cut -d ' ' -f 2)
if [ "$(printf '%s\n' "$wanted" "$found" | sort -V | head -n 1)" != "$wanted" ]; then
    say "cargo is $found and must be at least $wanted: \`rustup update stable\`, or install Rust from https://rustup.rs" >&2
    exit 1
fi
