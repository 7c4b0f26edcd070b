#!/usr/bin/env python3
"""Measures where a person waits, on four local nodes with a real Flux, beside the same number of brokers of a plain `flux start`. As root.

    BUNDLE=FILE scripts/bench_waits.py [TURNS]

1. epoch change: `flux-distribute local restart`, packages there, no job: until all four are free.
2. the nodes' power off and on, packages there: from power on until all four are free.
3. a node joins beside a job on the three others: as in bench_elastic.py.
Beside 1 and 2: `flux start --test-size=4`, from its start until all four are free, and until it has ended. TURNS times each (default: 8). Prints JSON.
BINARY, DIR: as for bench_elastic.py."""

import concurrent.futures, json, os, signal, statistics, subprocess, sys, tempfile, time

from bench_elastic import Cluster, Failed, count_nodes, joins, until

NODES = 4
FLUX = os.path.join(os.environ.get("FLUX_PREFIX", "/opt/flux"), "bin", "flux")
# Runs as the initial program: prints when all four are there.
ALL_FREE = f'until [ "$(flux resource list -s free -no "{{nnodes}}" 2>/dev/null)" = {NODES} ]; do :; done; date +%s.%N'


def bare():
    """Seconds of a plain start: until all brokers are there, and until they have ended."""
    begin = time.time()
    done = subprocess.run([FLUX, "start", f"--test-size={NODES}", "sh", "-c", ALL_FREE], capture_output=True, text=True, timeout=120, check=True)
    return float(done.stdout.split()[-1]) - begin, time.time() - begin


def restart(cluster):
    """An epoch change. The brokers' own start time tells that they are new."""
    before = cluster.lead("flux", "getattr", "broker.starttime")
    begin = time.time()
    cluster.local("restart")
    until("the next epoch", lambda: started(cluster) not in (None, before))
    until("all nodes", lambda: count_nodes(cluster, "free") == NODES)
    return time.time() - begin


def started(cluster):
    try:
        return cluster.lead("flux", "getattr", "broker.starttime")
    except Failed:
        return None


def on_all(cluster, action):
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for _ in pool.map(lambda number: cluster.local("node", f"node{number}", action), range(1, NODES + 1)):
            pass


def power(cluster):
    on_all(cluster, "power-off")
    begin = time.time()
    on_all(cluster, "power-on")
    until("all nodes", lambda: count_nodes(cluster, "free") == NODES)
    return time.time() - begin


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    turns = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    with tempfile.TemporaryDirectory(prefix="bench-waits.", dir=os.environ.get("DIR", "/var/tmp")) as place:
        cluster = Cluster(place, {"maxSize": NODES, "size": NODES}, NODES)
        try:
            until("all nodes", lambda: count_nodes(cluster, "free") == NODES)
            found = {"turns": turns, "restart": [], "power": [], "bare_start": [], "bare_whole": []}
            for _ in range(turns):
                found["restart"].append(restart(cluster))
                start, whole = bare()
                found["bare_start"].append(start)
                found["bare_whole"].append(whole)
            for _ in range(turns):
                found["power"].append(power(cluster))
            until("all nodes", lambda: count_nodes(cluster, "up") == NODES)
            cluster.lead("flux", "submit", "-N3", "-n3", "--requires=rank:0-2", "sleep", "inf")
            found["join"] = joins(cluster, turns)
            print(json.dumps({name: each if isinstance(each, int) else {"median": statistics.median(each), "worst": max(each)} for name, each in found.items()}))
        finally:
            cluster.down()


if __name__ == "__main__":
    main()
