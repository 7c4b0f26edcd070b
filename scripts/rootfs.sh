#!/usr/bin/env bash
# Puts together what the image holds: one static binary, CA certificates, licences.
#
#   scripts/rootfs.sh BINARY DIRECTORY
set -euo pipefail
cd "$(dirname "$0")/.."
binary=$1 directory=$2

if readelf --program-headers "$binary" | grep -q INTERP; then
    echo "$binary is not static: it would look for a dynamic loader, and the image has none" >&2
    exit 1
fi
"$binary" --version >/dev/null || { echo "$binary does not run here: build it on this machine (\`make image-binary\`)" >&2; exit 1; }
if "$binary" local --help >/dev/null 2>&1; then
    echo "$binary has local mode, which does not belong into an image: build it with --no-default-features (\`make image-binary\`)" >&2
    exit 1
fi
certificates=/etc/ssl/certs/ca-certificates.crt
[ -s "$certificates" ] || { echo "no $certificates: install ca-certificates" >&2; exit 1; }

rm -rf "$directory"
install -D -m 755 "$binary" "$directory/flux-distribute"
install -D -m 644 "$certificates" "$directory$certificates"
install -D -m 644 LICENSE "$directory/licenses/LICENSE"
# Without a name and a time in it (-n): the same files give the same image.
python3 scripts/licenses.py "$(rustc --print host-tuple)" | gzip -9 -n >"$directory/licenses/third-party.txt.gz"
