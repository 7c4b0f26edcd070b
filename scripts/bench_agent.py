#!/usr/bin/env python3
"""Measures what an agent costs its node while nothing happens, on local nodes. As root.

    BUNDLE=FILE scripts/bench_agent.py [SECONDS]

Ten nodes, so that some agents watch no Lease, as nearly all do in a large cluster. Counted are their agents with all host stages that they start,
for SECONDS (default: 150), by Linux: processor time, threads, memory, bytes written, and requests by the agents' own metrics. Prints JSON.
BINARY, DIR: as for bench_elastic.py."""

import json, os, pathlib, signal, socket, sys, tempfile, time

from bench_elastic import Cluster, count_nodes, until

NODES = 10
# The agents of ranks 0 to 3 watch the planner's Lease.
FIRST_PLAIN_RANK = 4
TICKS = os.sysconf("SC_CLK_TCK")
# A follower's agent rests this long between two rounds while nothing happens (CALM in crate agent).
REST = 30
# By then the first check of installed files is over: it begins within 90 s (FIRST, FIRST_SPREAD and CALM in crate agent). After 290 s each watch begins
# anew, which costs requests: choose SECONDS so that it ends before that.
SETTLES = 100


def of_status(pid, name):
    lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))


def cpu_seconds(pid):
    """Of the agent, and of its host stages, which have ended."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own, stages = sum(map(int, fields[11:13])), sum(map(int, fields[13:15]))
    return own / TICKS, stages / TICKS


def written(pid):
    lines = pathlib.Path(f"/proc/{pid}/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("write_bytes:"))


def metric(pid, name):
    """Sum of these series that the agent answers at the socket in its pod."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(f"/proc/{pid}/root/tmp/agent.sock")
        asking.sendall(b"GET /metrics HTTP/1.1\r\nHost: agent\r\nConnection: close\r\n\r\n")
        lines = b"".join(iter(lambda: asking.recv(1 << 16), b"")).decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"flux_distribute_{name}"))


def requests(pid):
    return metric(pid, "api_requests_total")


def spent(pid):
    return (*cpu_seconds(pid), requests(pid), written(pid))


def is_planner(pid):
    return metric(pid, "planner_round_seconds_count") > 0


def measure(seconds, place):
    cluster = Cluster(place, {"maxSize": 64}, NODES)
    try:
        until("all nodes", lambda: count_nodes(cluster, "up") == NODES)
        time.sleep(SETTLES)
        nodes = json.loads(cluster.local("status", "-o", "json"))
        plain = [node["agentPid"] for node in nodes if node["rank"] >= FIRST_PLAIN_RANK and not is_planner(node["agentPid"])]
        before = {pid: spent(pid) for pid in plain}
        begin, threads = time.monotonic(), 0
        while time.monotonic() < begin + seconds:
            threads = max([threads] + [of_status(pid, "Threads") for pid in plain])
            time.sleep(1)
        took = time.monotonic() - begin
        used = [[after - then for after, then in zip(spent(pid), before[pid])] for pid in plain]
        own, stages = max((each[:2] for each in used), key=sum)
        if not stages:
            sys.exit("no agent has looked at its host")
        asked, wrote = max(each[2] for each in used), max(each[3] for each in used)
        in_a_rest = lambda seconds: seconds * 1000 * REST / took
        memory = max(plain, key=lambda pid: of_status(pid, "VmRSS"))
        return {
            "seconds": took,
            "agents": len(plain),
            "threads": threads,
            "rss_mib": of_status(memory, "VmRSS") / 1024,
            "anonymous_mib": of_status(memory, "RssAnon") / 1024,
            "share_of_core": (own + stages) / took,
            "cpu_ms_in_30_secs": in_a_rest(own + stages),
            "stage_ms_in_30_secs": in_a_rest(stages),
            "requests": asked,
            "written_bytes": wrote,
        }
    finally:
        cluster.down()


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 150
    with tempfile.TemporaryDirectory(prefix="bench-agent.", dir=os.environ.get("DIR", "/var/tmp")) as place:
        print(json.dumps(measure(seconds, place)))


if __name__ == "__main__":
    main()
