#!/bin/bash
# Fuzzes the parsers of foreign bytes with libFuzzer, on the toolchain that builds everything
# else. Needs a C++ compiler (it installs none).
#
#   scripts/fuzz.sh [SECONDS [TARGET…]]     seconds for each target (default: 300); fuzz/corpus keeps what was found
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-300}
shift || true
targets=("$@")
[ ${#targets[@]} -gt 0 ] || mapfile -t targets < <(sed -n '/^\[\[bin\]\]/,/^path/s/^name = "\(.*\)"/\1/p' fuzz/Cargo.toml)
build=${CARGO_TARGET_DIR:-$PWD/fuzz/target}
host=$(rustc --print host-tuple)
# What `cargo fuzz run --sanitizer none` sets; the sanitizers need a nightly toolchain.
flags="--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 -Ccodegen-units=1
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table
    -Cllvm-args=-sanitizer-coverage-trace-compares"
(cd fuzz && RUSTFLAGS=$(echo $flags) CARGO_TARGET_DIR=$build cargo build --release --target "$host" "${targets[@]/#/--bin=}")
for target in "${targets[@]}"; do
    corpus=fuzz/corpus/$target
    mkdir -p "$corpus" fuzz/artifacts
    echo "== $target: $seconds s, $(find "$corpus" -type f | wc -l) inputs to begin with"
    log=$(mktemp)
    if ! TMPDIR=/dev/shm "$build/$host/release/$target" -max_total_time="$seconds" -timeout=20 -rss_limit_mb=2048 \
        -max_len=65536 -print_final_stats=1 -artifact_prefix="fuzz/artifacts/$target-" "$corpus" > "$log" 2>&1; then
        tail -40 "$log"
        echo "$target failed: its input is in fuzz/artifacts"
        exit 1
    fi
    grep -E "^stat::(number_of_executed_units|peak_rss_mb)|DONE" "$log"
    rm "$log"
done
