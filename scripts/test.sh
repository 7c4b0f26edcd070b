#!/usr/bin/env bash
# All tests, or those that the arguments name to `cargo test`. All of them: with Docker and
# kind on a real cluster too; without, the same end-to-end tests run in local mode.
set -euo pipefail
cd "$(dirname "$0")/.."

# The binaries are built as who we are; only the tests themselves run as root, for namespaces, cgroups and links.
if [ "$(id -u)" != 0 ]; then
    if sudo -n true 2>/dev/null; then
        runner=CARGO_TARGET_$(rustc --print host-tuple | tr 'a-z-' 'A-Z_')_RUNNER
        export "$runner=sudo -E env PATH=$PATH"
    else
        echo "skipped: not root and no sudo without a password: tests that make namespaces and cgroups"
    fi
fi

# Not captured: a test that can't run here says why in a line that begins with "skipped: ".
code=0
cargo test --locked --no-fail-fast "$@" -- --nocapture || code=$?
[ $# = 0 ] || exit "$code"

if command -v docker >/dev/null && command -v kind >/dev/null && docker info >/dev/null 2>&1; then
    [ "$code" != 0 ] || scripts/kind-test.sh
else
    echo "skipped: kind: no Docker daemon or no kind here; the end-to-end tests ran in local mode"
fi
exit "$code"
