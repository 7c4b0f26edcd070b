#!/usr/bin/env bash
# Four simulated nodes that are one Flux instance, on this machine.
#
#   BUNDLE=FILE|URL     install a bundle
#   CHANNEL=DIR|URL     install from this conda channel, in place of conda-forge
#   NODES=4
set -euo pipefail
cd "$(dirname "$0")/.."
binary=${BINARY:-${CARGO_TARGET_DIR:-target}/$(rustc --print host-tuple)/debug/flux-distribute}
nodes=${NODES:-4}
# Root is needed for namespaces, cgroups and links.
sudo=()
[ "$(id -u)" = 0 ] || sudo=(sudo -E)

source=()
[ -z "${BUNDLE:-}" ] || source+=(--bundle "$BUNDLE")
[ -z "${CHANNEL:-}" ] || source+=(--channel "$CHANNEL")
run() { echo "+ flux-distribute $*"; "${sudo[@]}" "$binary" "$@"; }

if [ "${1:-}" = down ]; then
    run local down
    exit
fi
run local up --nodes "$nodes" --timeout "${TIMEOUT:-20m}" "${source[@]}"
run local exec node1 -- flux resource list
echo "(flux-spare-N: ranks kept free for nodes that may join; \`down\` is as it should be)"
run local exec node1 -- flux run -N"$nodes" hostname
echo
echo "It is still up: ${sudo[*]:+${sudo[*]} }$binary local exec node1 -- flux …"
echo "Take it down:   make demo-down"
