#!/bin/sh
# Measures installing packages, as ratios to what the machine can do at all: on tmpfs and on the disk.
#
#   scripts/bench-packages.sh [RUNS]
#
# PY_RATTLER  a python that has py-rattler (pip install py-rattler), to measure that beside it
# DISK        a directory on the disk to measure (default: target/)
# LTO=1       build as a release is; takes much longer and changes little
set -eu
cd "$(dirname "$0")/.."
if [ -z "${LTO:-}" ]; then
    export CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16
fi
channel=target/bench-channel
if [ ! -e "$channel/size.json" ]; then
    rm -rf "$channel"
    python3 scripts/bench_channel.py "$channel"
fi
bench=$(cargo bench --locked --no-run --bench packages --message-format json |
    python3 -c 'import json, sys
print([m["executable"] for m in map(json.loads, sys.stdin) if m.get("target", {}).get("kind") == ["bench"]][-1])')
exec python3 scripts/bench_packages.py "$bench" "$channel" "${1:-5}" /dev/shm "${DISK:-target}"
