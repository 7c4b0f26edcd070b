#!/usr/bin/env bash
# Four simulated nodes that are one Flux instance, on this machine: a job on all of them, then a gang of pods beside a job.
# Without a way to Flux, the same without jobs and pods.
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

[ -z "${BUNDLE:-}" ] || [ -z "${CHANNEL:-}" ] || fail "BUNDLE and CHANNEL are both given: give one of them"
[[ $nodes =~ ^[1-9][0-9]*$ ]] || fail "NODES is \"$nodes\", not a number of nodes"

# Root is needed for namespaces, cgroups and links.
sudo=()
if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || fail "needs root, and there is no sudo: run this as root"
    sudo=(sudo -E)
fi

# Whether a server listens where a URL points: all that can be asked with nothing but bash. Names that don't resolve take
# their time, too.
listens() { # URL
    local rest=${1#*://} port=80
    [[ $1 != https://* ]] || port=443
    rest=${rest%%[/?#]*}
    rest=${rest##*@}
    [[ $rest != *:* ]] || port=${rest##*:}
    timeout 2 bash -c 'exec 3<>"/dev/tcp/$0/$1"' "${rest%:*}" "$port" 2>/dev/null
}

# The machine's proxy for a URL, if its environment names one.
proxy() { # URL
    case $1 in
        https://*) echo "${HTTPS_PROXY:-${https_proxy:-${ALL_PROXY:-${all_proxy:-}}}}" ;;
        *) echo "${HTTP_PROXY:-${http_proxy:-${ALL_PROXY:-${all_proxy:-}}}}" ;;
    esac
}

# Whether the proxy reaches it, only `local up` finds out.
answers() { # URL
    local proxy
    proxy=$(proxy "$1")
    listens "$1" || { [ -n "$proxy" ] && listens "$proxy"; }
}

unreachable() { # URL
    local proxy
    proxy=$(proxy "$1")
    echo "can't reach $1${proxy:+, nor the proxy that the environment names}"
}

# What is wrong with the source, if anything can be seen from here; `local up` looks more closely.
missing() {
    local channel=${CHANNEL:-https://conda.anaconda.org/conda-forge} in=
    case ${BUNDLE:-} in
        "") ;;
        http://* | https://*) answers "$BUNDLE" || unreachable "$BUNDLE"; return ;;
        *)
            [ -f "${BUNDLE#file://}" ] || { [[ $BUNDLE == /* || $BUNDLE == file://* ]] || in=" in $PWD"; echo "there is no bundle $BUNDLE$in"; return; }
            [ "$(head -c 2 "${BUNDLE#file://}" | od -An -tx1 | tr -d ' ')" = 1f8b ] || echo "$BUNDLE is no .tar.gz"
            return ;;
    esac
    case $channel in
        http://* | https://*) answers "$channel" || unreachable "$channel" ;;
        *) compgen -G "${channel#file://}/*/repodata.json*" >/dev/null || echo "$channel is not a conda channel: it has no repodata.json" ;;
    esac
}

find_binary() {
    export PATH="$PATH:$HOME/.cargo/bin"
    command -v rustc >/dev/null || [ -n "${BINARY:-}" ] || return 1
    local profile
    for profile in debug release; do
        binary=${BINARY:-${CARGO_TARGET_DIR:-target}/$(rustc --print host-tuple)/$profile/flux-distribute}
        [ ! -x "$binary" ] || return 0
    done
    return 1
}
run() { echo "+ ${sudo[*]:+${sudo[*]} }$binary $*"; "${sudo[@]}" "$binary" "$@"; }

if [ "${1:-}" = down ]; then
    find_binary || fail "no flux-distribute is built here: \`make build\`, or set BINARY to the one that brought the demo up"
    run local down
    exit
fi

[ -z "${BINARY:-}" ] || [ -x "$BINARY" ] || fail "there is no program $BINARY"
case $flux in auto | required | none) ;; *) fail "FLUX is $flux; it may be auto, required or none" ;; esac
! "${sudo[@]}" test -e "$state/cluster.json" || fail "a local cluster is up, or left over, in $state: take it down first with \`make demo-down\`"
why=
option=(--flux "$flux")
if [ "$flux" = none ]; then
    why="FLUX=none asks for it"
elif found=$(missing) && [ -n "$found" ]; then
    # A user who names a source wants that one.
    [ "$flux$([ -z "${BUNDLE:-}${CHANNEL:-}" ] || echo named)" = auto ] || fail "$found; for Flux, give $remedies"
    # `local up` looks once more; it is asked for Flux, so it says the same reason if there is none.
    why="$found; for Flux, give $remedies"
fi
[ -z "$why" ] || echo "No Flux will run in this demo: $why. It shows agents, planner and API server with a stand-in for brokers."

if [ -z "${BINARY:-}" ]; then
    scripts/setup.sh
    export PATH="$PATH:$HOME/.cargo/bin"
    cargo build --locked
fi
find_binary || fail "cargo built no flux-distribute"

source=()
[ -z "${BUNDLE:-}" ] || source+=(--bundle "$BUNDLE")
[ -z "${CHANNEL:-}" ] || source+=(--channel "$CHANNEL")
[ "$flux" != none ] || source=()

# If the demo fails, take the cluster down, so that the next run can start.
output=$(mktemp)
finish() {
    local code=$?
    # A terminal that is gone keeps nothing from being taken down.
    set +e
    trap - EXIT
    local end="it did not get to its end" begun=
    [ "$code" -lt 129 ] || end=interrupted
    # By its output: a cluster that is there without it is somebody else's.
    ! grep -q '^API server at ' "$output" || begun=1
    rm -f "$output"
    # `local up` takes down itself what it gives up, and says so.
    if [ "$code" != 0 ] && [ -n "$begun" ] && "${sudo[@]}" test -e "$state/cluster.json"; then
        echo "demo: $end, and is taken down"
        "${sudo[@]}" "$binary" local down
    elif [ "$code" -ge 129 ]; then
        echo "demo: interrupted"
    fi
    exit "$code"
}
trap finish EXIT
# The terminal sends Ctrl-C to all of them. tee stays until `local up` has said its last word.
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP
run local up --nodes "$nodes" --pods --timeout "${TIMEOUT:-20m}" "${option[@]}" "${source[@]}" | tee -i "$output"
if ! grep -q '^stand-in, no Flux' "$output"; then
    why=
elif [ -z "$why" ]; then
    why="conda-forge can't be reached; for Flux, give $remedies"
fi
if [ -z "$why" ]; then
    run local exec node1 -- flux resource list
    run local exec node1 -- flux run -N"$nodes" hostname
    cores=$("${sudo[@]}" "$binary" local exec node1 -- flux resource list -s free -no '{ncores}' | tail -n 1)
    if [ "$cores" -ge 4 ]; then
        run local exec node1 -- flux submit --job-name=host-job sleep 120
        run local apply example/pods-bare.yaml
        end=$((SECONDS + 120))
        until [ "$("${sudo[@]}" "$binary" local pods | grep -c ' Running ')" = 3 ]; do
            [ "$SECONDS" -lt "$end" ] || { run local pods >&2; fail "the gang of pods does not run"; }
            sleep 1
        done
        run local pods
        run local exec node1 -- flux jobs
        echo "The gang holds its cores for a minute, the job for two; \`flux cancel --all\` in a node ends both."
        echo "One core of each node is kept for pods of other schedulers, so that jobs have $cores of them."
    else
        echo "No pods run in this demo: a gang of three beside a job needs 4 cores, and the nodes have $cores together, beside the core of each that is kept for pods of other schedulers."
    fi
else
    more=node$((nodes + 1))
    online() {
        local end=$((SECONDS + 120))
        until "${sudo[@]}" "$binary" local status | grep -q "^$1 .* Online "; do
            [ "$SECONDS" -lt "$end" ] || { run local logs "$1" | tail -n 20 >&2; fail "$1 does not come online"; }
            sleep 1
        done
    }
    # A field of a node, or nothing while it has none.
    field() { # NODE NAME
        "${sudo[@]}" "$binary" local status -o json |
            awk -v node="\"$1\"," -v key="\"$2\":" '$1 == "\"name\":" { here = $2 == node } here && $1 == key && $2 + 0 { print $2 + 0 }'
    }
    # The agent of node2 that has come in place of $1.
    another_agent() {
        local end=$((SECONDS + 120)) now
        until now=$(field node2 agentPid) && [ -n "$now" ] && [ "$now" != "$1" ]; do
            [ "$SECONDS" -lt "$end" ] || { run local logs node2 | tail -n 20 >&2; fail "node2 gets no other agent"; }
            sleep 1
        done
        echo "$now"
    }
    run local exec node1 --agent -- status
    run local add-node
    online "$more"
    agent=$(field node2 agentPid)
    broker=$(field node2 brokerPid)
    run local agent node2 kill
    next=$(another_agent "$agent")
    online node2
    [ "$(field node2 brokerPid)" = "$broker" ] || fail "the broker of node2 is not $broker any more"
    echo "node2: agent $agent was killed, agent $next has taken over; the broker is the same process"
    run local status
fi
echo
echo "It is still up: ${sudo[*]:+${sudo[*]} }$binary local --help"
# What another shell needs to find this cluster.
settings=${BINARY:+BINARY=$BINARY }${FLUX_DISTRIBUTE_LOCAL_DIR:+FLUX_DISTRIBUTE_LOCAL_DIR=$FLUX_DISTRIBUTE_LOCAL_DIR }
echo "Take it down:   ${settings}make demo-down"
[ -z "$why" ] || echo "No Flux ran in this demo: $why."
