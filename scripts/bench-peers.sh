#!/bin/bash
# Measures how often the source is asked when many nodes install: the source sits in a network namespace of its own
# behind a slow link, the nodes are local ones. As root, with iptables.
#
#   CHANNEL=DIR scripts/bench-peers.sh [NODES]     a conda channel that has flux-core
#   BUNDLE=FILE scripts/bench-peers.sh [NODES]     or a bundle
#
# SPEC     what to install of a channel (default: as for a FluxInstance)
# RATE     of the source's link, as tc has it (default: 100mbit)
# LIMIT    seconds after which to give up (default: 600)
# DIR      where the nodes are (default: /var/tmp)
# BINARY   the flux-distribute to run (default: the release build)
set -euo pipefail
shopt -s inherit_errexit
cd "$(dirname "$0")/.."
nodes=${1:-8}
rate=${RATE:-100mbit}
limit=$((SECONDS + ${LIMIT:-600}))
binary=${BINARY:-${CARGO_TARGET_DIR:-target}/$(rustc --print host-tuple)/release/flux-distribute}
space=fxd-source-$$
# For measurements (RFC 2544); some machines use even such addresses, so it is looked at first.
ours=198.18.213.1 theirs=198.18.213.2 port=8000
if [ -n "$(ip -4 route show root 198.18.0.0/15)" ]; then
    echo "this machine uses addresses of 198.18.0.0/15, which this would take over" >&2
    exit 1
fi
work=$(mktemp -d "${DIR:-/var/tmp}/bench-peers.XXXXXX")
export FLUX_DISTRIBUTE_LOCAL_DIR=$work/local

clean() {
    [ ! -e "$work/local" ] || "$binary" local down > /dev/null || true
    [ -z "${server:-}" ] || kill "$server" 2> /dev/null || true
    ip netns del "$space" 2> /dev/null || true
    rm -rf "$work"
}
trap clean EXIT

if [ -n "${BUNDLE:-}" ]; then
    served=$(dirname "$(realpath "$BUNDLE")")
    source=(--bundle "http://$theirs:$port/$(basename "$BUNDLE")")
else
    served=$(realpath "$CHANNEL")
    source=(--channel "http://$theirs:$port/" ${SPEC:+--spec "$SPEC"})
fi
ip netns add "$space"
ip link add "fxds$$" type veth peer name source netns "$space"
ip address add "$ours/30" dev "fxds$$"
ip link set "fxds$$" up
ip -n "$space" address add "$theirs/30" dev source
ip -n "$space" link set source up
ip -n "$space" link set lo up
ip netns exec "$space" tc qdisc add dev source root tbf rate "$rate" burst 64kb latency 100ms
ip netns exec "$space" python3 - "$served" "$theirs" "$port" 2> /dev/null <<'PYTHON' &
import functools, http.server, sys
served, address, port = sys.argv[1:]
class Handler(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
http.server.ThreadingHTTPServer((address, int(port)), functools.partial(Handler, directory=served)).serve_forever()
PYTHON
server=$!

# Bytes that left the source, with their headers.
sent() { ip netns exec "$space" cat /sys/class/net/source/statistics/tx_bytes; }
# Runs a command in the network of each node that is up.
in_nodes() {
    local pids pid
    pids=$("$binary" local status --output json | python3 -c 'import json, sys
print(*(node["initPid"] for node in json.load(sys.stdin) if node["initPid"]))')
    for pid in $pids; do
        nsenter --target "$pid" --net "$@"
    done
}
# Archives leave a node from its peer port, with their headers: all else on its link is the API's and the brokers', or
# acknowledges what came.
uploads() { in_nodes iptables -w -nvxL OUTPUT | awk '/spt:8052/ { print $2 }'; }
# A node counts as installed in this phase or a later one; nodes that failed are listed when the time is over.
installed() {
    "$binary" local status --output json |
        python3 -c 'import json, sys
print(sum(node["phase"] in ("Starting", "Online") or (node["message"] or "").startswith("installed")
          for node in json.load(sys.stdin)))'
}

# Prints: seconds until all are installed, bytes from the source, the busiest node's upload.
measure() {
    local count=$1 before start done
    before=$(sent)
    "$binary" local up --nodes "$count" --no-wait "${source[@]}" > /dev/null
    start=$(date +%s.%N)
    until [ "$(in_nodes echo up | wc -l)" = "$count" ]; do sleep 0.1; done
    in_nodes iptables -w -A OUTPUT -p tcp --sport 8052
    while done=$(installed) && [ "$done" -lt "$count" ]; do
        if [ "$SECONDS" -gt "$limit" ]; then
            "$binary" local status >&2
            return 1
        fi
        sleep 0.2
    done
    [ "$done" = "$count" ]
    python3 -c 'import sys, time; print(f"{time.time() - float(sys.argv[1]):.1f}", end=" ")' "$start"
    echo "$(($(sent) - before)) $(uploads | sort -n | tail -1)"
    "$binary" local down > /dev/null
}

until ip netns exec "$space" python3 -c "import socket; socket.create_connection(('$theirs', $port))" 2> /dev/null; do
    kill -0 "$server"
    sleep 0.1
done
one=$(measure 1)
read -r one_seconds one_sent one_upload <<< "$one"
echo "1 node: $one_seconds s, $one_sent bytes from the source (this is 1.0 of it), $one_upload uploaded to peers"
all=$(measure "$nodes")
read -r all_seconds all_sent all_upload <<< "$all"
python3 - "$nodes" "$one_seconds" "$one_sent" "$all_seconds" "$all_sent" "$all_upload" <<'PYTHON'
import sys
nodes, one_seconds, one_sent, seconds, sent, upload = map(float, sys.argv[1:])
print(f"{nodes:.0f} nodes: {seconds} s ({seconds / one_seconds:.2f} x one), {sent / one_sent:.3f} x from the source, "
      f"{upload / one_sent:.2f} x uploaded by the busiest")
PYTHON
