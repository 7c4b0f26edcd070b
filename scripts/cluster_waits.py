#!/usr/bin/env python3
"""Measures what a person waits for on a real cluster of three nodes or more.

    KUBECONFIG=… scripts/cluster_waits.py --manifest FILE --node-shell 'COMMAND {node}' [--power 'COMMAND {action} {node}']
        [--runs 5] [--rows WORD,…]

1. One apply, with nothing on the hosts: from the moment when all agents run until Flux has all nodes, and how long nodes have fetched, unpacked
   and linked packages meanwhile.
2. The same after a power cut of all nodes: the packages are there.
3. A power cut of one node beside a job on the others: from its Node's Ready until Flux has it again.

Beside it, in the same run, on the lead's node: as many brokers that `flux start` starts there, and stops. The arguments are those of cluster_faults.py.
Use a cluster that can be damaged: each node loses its power."""

import json, re, statistics, time

from cluster import Cluster, Wrong, kubectl, main, ours, until

PODS = ("-l", "app=install-flux", "-o", "json")
DONE = re.compile(r"done in ([0-9.]+) (ms|s)\b")


class Waits(Cluster):
    OWN = "seconds waited"

    def misses(self, row):
        return "--power" if row in POWER_CUTS and not self.power_command else None

    def agents(self):
        """When the container of each node's agent was started, of those that run."""
        found = json.loads(ours("get", "pods", *PODS))["items"]
        running = ((pod, status["state"].get("running")) for pod in found for status in pod["status"].get("containerStatuses", []))
        return {pod["spec"]["nodeName"]: state["startedAt"] for pod, state in running if state}

    def all_run(self, before):
        """The moment at which all agents run, none of them one of `before`."""
        def look():
            now = self.agents()
            return sorted(now) == sorted(self.nodes) and all(before.get(node) != began for node, began in now.items()) or now

        until("all agents", look)
        return time.time()

    def has_all(self):
        """When Flux had the last of all nodes."""
        def look():
            return (up := self.flux("resource", "list", "-s", "free,allocated", "-no", "{nnodes}").split()) and sum(map(int, up)) == len(self.nodes) or up

        until("all nodes in Flux", look)
        events = map(json.loads, self.flux("resource", "eventlog", "--format=json").splitlines())
        return max(event["timestamp"] for event in events if event["name"] == "online")

    def apply(self):
        self.down()
        until("a cluster without us", lambda: kubectl("get", "namespace", "flux-distribute", "--ignore-not-found").strip() == "" or "not yet")
        kubectl("apply", "-f", self.manifest)
        begin = self.all_run({})
        waited = self.has_all() - begin
        pods = [pod["metadata"]["name"] for pod in json.loads(ours("get", "pods", *PODS))["items"]]
        took = [sum(float(number) / (1000 if unit == "ms" else 1) for number, unit in DONE.findall(ours("logs", pod))) for pod in pods]
        print(f"measured: packages took {statistics.median(took):.2f} s of it, at most {max(took):.2f} s", flush=True)
        self.beside()
        return waited

    def power_of_all(self):
        before = self.agents()
        for action in ("kill", "start"):
            for node in self.nodes:
                self.power(action, node)
        begin = self.all_run(before)
        waited = self.has_all() - begin
        self.beside()
        return waited

    def power_of_one(self):
        lead = self.instance()["status"]["lead"]
        node = next(node for node in self.nodes if node != lead)
        job = self.job_on(1, f"--requires=host:{lead}")
        self.power("kill", node)
        until("a node that Flux has lost", lambda: self.is_ready(node) is False or "Ready")
        self.power("start", node)
        until("a node that is Ready", lambda: self.is_ready(node) or "not Ready")
        begin = time.time()
        waited = self.has_all() - begin
        self.end(job)
        return waited

    def is_ready(self, node):
        conditions = json.loads(kubectl("get", "node", node, "-o", "json"))["status"]["conditions"]
        return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)

    def beside(self):
        """The same number of brokers without us, on one node."""
        script = f"date +%s.%N; flux start --test-size={len(self.nodes)} date +%s.%N; date +%s.%N"
        begin, up, end = map(float, self.on_lead("sh", "-c", script).split())
        print(f"measured: {len(self.nodes)} brokers of `flux start` are up after {up - begin:.2f} s and gone after {end - begin:.2f} s", flush=True)


POWER_CUTS = [Waits.power_of_all, Waits.power_of_one]
ROWS = {
    "one apply, nothing there": Waits.apply,
    "power of all nodes, packages there": Waits.power_of_all,
    "power of one node beside a job": Waits.power_of_one,
}

main(__doc__, ROWS, Waits)
