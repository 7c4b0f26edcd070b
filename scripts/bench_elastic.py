#!/usr/bin/env python3
"""Measures what it takes to grow, on local nodes with real Flux. As root, with kubectl in PATH.

    BUNDLE=FILE scripts/bench_elastic.py [TURNS]

1. A node that is Ready and has its packages gets a rank (`kubectl scale` to one more): seconds until the scheduler gives
   it to a job that waits for it, by Flux's own time. TURNS times (default: 20), without and with a job on all other nodes.
2. maxSize 1,024 beside maxSize 4, both with four members: seconds from the lead's broker's start until all four are
   there, and the resident memory of all processes of the lead's broker.

The scheduler is Fluxion where BUNDLE has it, else sched-simple. BINARY is the flux-distribute to run (default: the release build), DIR where the nodes are (default: /var/tmp)."""

import json, os, statistics, subprocess, sys, tempfile, time

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class Failed(Exception):
    pass


def run(*words, env=None, stdin=None):
    done = subprocess.run(words, env=env, input=stdin, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise Failed(f"{' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip()


def binary():
    host = run("rustc", "--print", "host-tuple")
    target = os.environ.get("CARGO_TARGET_DIR", os.path.join(HERE, "target"))
    return os.environ.get("BINARY", os.path.join(target, host, "release", "flux-distribute"))


def until(what, look, limit=120):
    end = time.monotonic() + limit
    while not (found := look()):
        if time.monotonic() > end:
            sys.exit(f"waited in vain for {what}")
        time.sleep(0.05)
    return found


class Cluster:
    def __init__(self, place, instance, nodes=4):
        self.binary = binary()
        self.env = dict(os.environ, FLUX_DISTRIBUTE_LOCAL_DIR=os.path.join(place, "local"))
        spec = os.path.join(place, "instance.yaml")
        kind = {"apiVersion": "distribute.flux-framework.org/v1alpha1", "kind": "FluxInstance"}
        with open(spec, "w") as file:
            json.dump(kind | {"metadata": {"name": "flux"}, "spec": instance}, file)
        try:
            self.local("up", "--nodes", str(nodes), "--api", "embedded", "--bundle", os.environ["BUNDLE"], "--instance", spec)
        except BaseException:
            # Nodes may run, of a command that was killed, too.
            self.down()
            raise
        self.env["KUBECONFIG"] = os.path.join(place, "kubeconfig")
        with open(self.env["KUBECONFIG"], "w") as file:
            file.write(self.local("kubeconfig"))

    def local(self, *words):
        return run(self.binary, "local", *words, env=self.env)

    def kubectl(self, *words):
        return run("kubectl", "--namespace", "flux-distribute", *words, env=self.env)

    def lead(self, *words):
        return self.local("exec", "node1", "--", *words)

    def online(self):
        """When the last rank came online."""
        events = map(json.loads, self.lead("flux", "resource", "eventlog", "--format=json").splitlines())
        return max(event["timestamp"] for event in events if event["name"] == "online")

    def scale(self, size):
        self.kubectl("scale", "fxi/flux", f"--replicas={size}")

    def down(self):
        run(self.binary, "local", "down", env=self.env)


def joins(cluster, turns):
    times = []
    for _ in range(turns):
        cluster.scale(3)
        until("a node that has left", lambda: len(ranks(cluster)) == 3 and count_nodes(cluster, "up") == 3)
        job = cluster.lead("flux", "submit", "-N4", "-n4", "true")
        begin = time.time()
        cluster.scale(4)
        given = cluster.lead("flux", "job", "wait-event", "--timeout=60", "--format=json", job, "alloc")
        times.append(json.loads(given)["timestamp"] - begin)
        until("all nodes", lambda: count_nodes(cluster, "up") == 4)
    return times


def ranks(cluster):
    nodes = json.loads(cluster.kubectl("get", "fluxnodes", "-o", "json"))["items"]
    return {node["spec"]["rank"] for node in nodes if node["spec"].get("rank") is not None}


def count_nodes(cluster, state):
    """How many nodes Flux lists as `state` (`up`, `free`). None while Flux can't say: in a live change there is no scheduler for a moment."""
    try:
        return int(cluster.lead("flux", "resource", "list", "-s", state, "-no", "{nnodes}") or 0)
    except (Failed, ValueError):
        return None


def memory(cluster):
    """MiB of everything that the lead's broker has started."""
    script = """for status in /proc/[0-9]*/status; do
    awk '/^Name:/ { name = $2 } /^VmRSS:/ { rss = $2 } END { if (name ~ /^(flux-|python|sched)/ && name != "flux-distribute") print rss }' $status
    done 2>/dev/null | awk '{ sum += $1 } END { print sum / 1024 }'"""
    return float(cluster.lead("sh", "-c", script))


def start(cluster):
    """From the lead's broker's start to its last member."""
    return cluster.online() - float(cluster.lead("flux", "getattr", "broker.starttime"))


def figures(seconds):
    return f"median {statistics.median(seconds):.2f} s, worst {max(seconds):.2f} s of {len(seconds)}"


def main():
    turns = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    for size in (4, 1024):
        with tempfile.TemporaryDirectory(prefix="bench-elastic.", dir=os.environ.get("DIR", "/var/tmp")) as place:
            cluster = Cluster(place, {"maxSize": size, "size": 4})
            try:
                until("all nodes", lambda: count_nodes(cluster, "up") == 4)
                print(f"maxSize {size}: all four after {start(cluster):.2f} s, lead {memory(cluster):.0f} MiB", flush=True)
                if size == 4:
                    print(f"a node joins: {figures(joins(cluster, turns))}", flush=True)
                    cluster.lead("flux", "submit", "-N3", "-n3", "--requires=rank:0-2", "sleep", "inf")
                    print(f"the same beside a job: {figures(joins(cluster, turns))}", flush=True)
            finally:
                cluster.down()


if __name__ == "__main__":
    main()
