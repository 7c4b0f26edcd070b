#!/usr/bin/env bash
# Four simulated nodes that are one Flux instance, on this machine; without a way to Flux, the same without jobs.
#
#   BUNDLE=FILE|URL     install a bundle
#   CHANNEL=DIR|URL     install from this conda channel, in place of conda-forge
#   FLUX=required       no Flux is an error; FLUX=none: don't look for it
#   NODES=4
#
#   scripts/demo.sh          looks first, then builds, then shows it
#   scripts/demo.sh down     takes it down
#   BINARY=FILE              in place of one that is built here
set -euo pipefail
cd "$(dirname "$0")/.."
nodes=${NODES:-4}
flux=${FLUX:-auto}
state=${FLUX_DISTRIBUTE_LOCAL_DIR:-/var/lib/flux-distribute-local}
remedies="BUNDLE=FILE|URL (\`flux-distribute bundle create\` makes one on a machine with Flux or internet access) or CHANNEL=DIR|URL"

fail() { echo "demo: $*" >&2; exit 2; }

# Root is needed for namespaces, cgroups and links.
sudo=()
if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || fail "needs root, and there is no sudo: run this as root"
    sudo=(sudo -E)
fi

# Whether a server listens where a URL points: all that can be asked with nothing but bash. Names that don't resolve take
# their time, too.
answers() { # URL
    local rest=${1#*://} port=80
    [[ $1 != https://* ]] || port=443
    rest=${rest%%[/?#]*}
    rest=${rest##*@}
    [[ $rest != *:* ]] || port=${rest##*:}
    timeout 2 bash -c 'exec 3<>"/dev/tcp/$0/$1"' "${rest%:*}" "$port" 2>/dev/null
}

# What is wrong with the source, if anything can be seen from here; `local up` looks more closely.
missing() {
    local channel=${CHANNEL:-https://conda.anaconda.org/conda-forge}
    case ${BUNDLE:-} in
        "") ;;
        http://* | https://*) answers "$BUNDLE" || echo "can't reach $BUNDLE"; return ;;
        *)
            [ -f "${BUNDLE#file://}" ] || { echo "there is no bundle $BUNDLE"; return; }
            [ "$(head -c 2 "${BUNDLE#file://}" | od -An -tx1 | tr -d ' ')" = 1f8b ] || echo "$BUNDLE is no .tar.gz"
            return ;;
    esac
    case $channel in
        http://* | https://*) answers "$channel" || echo "can't reach $channel" ;;
        *) compgen -G "${channel#file://}/*/repodata.json*" >/dev/null || echo "$channel is not a conda channel: it has no repodata.json" ;;
    esac
}

find_binary() {
    export PATH="$PATH:$HOME/.cargo/bin"
    command -v rustc >/dev/null || [ -n "${BINARY:-}" ] || return 1
    binary=${BINARY:-${CARGO_TARGET_DIR:-target}/$(rustc --print host-tuple)/debug/flux-distribute}
    [ -x "$binary" ]
}
run() { echo "+ flux-distribute $*"; "${sudo[@]}" "$binary" "$@"; }

if [ "${1:-}" = down ]; then
    find_binary || fail "no flux-distribute is built here: \`make build\`, or set BINARY to the one that brought the demo up"
    run local down
    exit
fi

[ -z "${BINARY:-}" ] || [ -x "$BINARY" ] || fail "there is no program $BINARY"
case $flux in auto | required | none) ;; *) fail "FLUX is $flux; it may be auto, required or none" ;; esac
[ ! -e "$state" ] || fail "a local cluster is up, or left over, in $state: take it down first with \`make demo-down\`"
why=
if [ "$flux" = none ]; then
    why="FLUX=none asks for it"
elif found=$(missing) && [ -n "$found" ]; then
    # A user who names a source wants that one.
    [ "$flux$([ -z "${BUNDLE:-}${CHANNEL:-}" ] || echo named)" = auto ] || fail "$found; for Flux, give $remedies"
    flux=none
    why="$found; for Flux, give $remedies"
fi
[ -z "$why" ] || echo "No Flux will run in this demo: $why. It shows agents, planner and API server with a stand-in for brokers."

if [ -z "${BINARY:-}" ]; then
    scripts/setup.sh
    export PATH="$PATH:$HOME/.cargo/bin"
    cargo build --locked
fi
find_binary || fail "there is no $binary"

source=()
[ -z "${BUNDLE:-}" ] || source+=(--bundle "$BUNDLE")
[ -z "${CHANNEL:-}" ] || source+=(--channel "$CHANNEL")
[ "$flux" != none ] || source=(--flux none)
[ "$flux" != required ] || source+=(--flux required)

# If the demo fails, take the cluster down, so that the next run can start.
output=$(mktemp)
finish() {
    local code=$?
    trap - EXIT
    rm -f "$output"
    # `local up` takes down itself what it gives up, and says so.
    if [ "$code" != 0 ] && [ -e "$state" ]; then
        echo "demo: it did not get to its end, and is taken down"
        "${sudo[@]}" "$binary" local down
    fi
    exit "$code"
}
trap finish EXIT
run local up --nodes "$nodes" --timeout "${TIMEOUT:-20m}" "${source[@]}" | tee "$output"
if [ -z "$why" ] && grep -q '^stand-in, no Flux' "$output"; then
    why="conda-forge can't be reached; for Flux, give $remedies"
fi
if [ -z "$why" ]; then
    run local exec node1 -- flux resource list
    run local exec node1 -- flux run -N"$nodes" hostname
else
    more=node$((nodes + 1))
    online() {
        local end=$((SECONDS + 120))
        until "${sudo[@]}" "$binary" local status | grep -q "^$1 .* Online "; do
            [ "$SECONDS" -lt "$end" ] || { run local logs "$1" | tail -n 20 >&2; fail "$1 does not come online"; }
            sleep 1
        done
    }
    run local exec node1 --agent -- status
    run local add-node
    online "$more"
    run local agent node2 kill
    online node2
    run local status
fi
echo
echo "It is still up: ${sudo[*]:+${sudo[*]} }$binary local --help"
echo "Take it down:   make demo-down"
[ -z "$why" ] || echo "No Flux ran in this demo: $why."
