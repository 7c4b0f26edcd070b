#!/usr/bin/env bash
# All tests, or those that the arguments name to `cargo test`. All of them: with Docker and kind on a real cluster too.
# Ends with a summary, whose last line is "N passed, N failed, N skipped".
#
#   REQUIRE=NEED,…   fail the tests that end early for one of these needs (tests/support/needs.rs; scripts/needs.sh prints
#                    what this machine has)
#   KIND=no          leave out the kind cluster
set -euo pipefail
cd "$(dirname "$0")/.."

# The binaries are built by the user that calls this; only the tests run as root, for namespaces, cgroups and links.
if [ "$(id -u)" != 0 ] && sudo -n true 2>/dev/null; then
    runner=CARGO_TARGET_$(rustc --print host-tuple | tr 'a-z-' 'A-Z_')_RUNNER
    export "$runner=sudo -E env PATH=$PATH"
fi

# One more at once than there are processors: most tests wait for most of their time.
export RUST_TEST_THREADS=${RUST_TEST_THREADS:-$(($(nproc) + 1))}

log=$(mktemp)
trap 'rm -f "$log"' EXIT
# Not captured, since a test that ends early prints why, which the summary counts.
code=0
CARGO_TERM_COLOR=never cargo test --workspace --locked --no-fail-fast "$@" -- --nocapture 2>&1 | tee "$log" || code=${PIPESTATUS[0]}
# Only now, because building takes room too.
if [ "$code" != 0 ]; then
    stat --file-system --format='%a %b' "${TMPDIR:-/tmp}" | awk '$1 <= $2 / 10 {
        print "tests may have failed for lack of room: no more than a tenth of the file system for temporary files is free, which hosts leave to kubelet; make room, or set TMPDIR"
    }'
fi
if [ $# != 0 ]; then
    scripts/summary.py "$log" --status "$code"
    exit "$code"
fi

if [ "${KIND:-}" = no ]; then
    kind="KIND=no leaves it out"
elif ! { command -v docker && command -v kind && docker info; } >/dev/null 2>&1; then
    kind="there is no Docker daemon or no kind here"
elif [ "$code" != 0 ]; then
    kind="other tests have failed"
elif scripts/kind-test.sh; then
    kind=passed
else
    kind=failed
    code=1
fi
# cargo itself has failed only if that was not the kind test.
scripts/summary.py "$log" --status "$([ "$kind" = failed ] && echo 0 || echo "$code")" --kind "$kind"
exit "$code"
