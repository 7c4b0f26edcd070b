#!/usr/bin/env bash
# Checks by cargo-deny what may be in the binary (deny.toml): licences, sources, banned crates. Installs cargo-deny if it is missing.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PATH:$HOME/.cargo/bin"
version=0.20.2

if [ "$(cargo deny --version 2>/dev/null)" != "cargo-deny $version" ]; then
    echo "installing cargo-deny $version into ~/.cargo/bin (some minutes, once)"
    cargo install --locked --quiet cargo-deny --version "=$version"
fi
# Advisories are not a matter of the change that is tested.
cargo deny --locked --log-level error check licenses bans sources
