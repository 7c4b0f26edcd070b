#!/usr/bin/env python3
"""Pods of another scheduler beside pods and jobs of Flux on a real cluster: do the jobs other-pods/NODE hold what those pods use?

    KUBECONFIG=… scripts/cluster_account.py --manifest FILE --node-shell 'COMMAND {node}' --image IMAGE [--cpu 1] [--changes 60]
        [--runs 5] [--rows WORD,…]

IMAGE and the other arguments are those of cluster_pods.py; a core is one CPU here. Use a cluster that can be damaged; namespace default is
emptied."""

import json, math, random, time
from collections import Counter

from cluster import Wrong, kubectl, main, until
from pod_cluster import AGENT, BROKER, RESOURCES, PodCluster

# Thousandths of a CPU: the default of spec.pods.tolerance.
TOLERANCE = 500
SHADOW = "other-pods/"
# The cores of each node, and then those that each job holds: its name, the node and how many.
HELD = RESOURCES + """
def show(name, execution):
    for entry in execution["R_lite"]:
        for rank in IDset(entry["rank"]):
            print(name, nodes[rank], len(IDset(entry["children"]["core"])))
show("-", declared)
for job, execution in executions:
    show(job.name, execution)"""


def milli(quantity):
    return int(quantity[:-1]) if quantity.endswith("m") else int(float(quantity) * 1000)


def requested(pod):
    cpu = lambda containers: [milli(each.get("resources", {}).get("requests", {}).get("cpu", "0")) for each in containers]
    return max([sum(cpu(pod["spec"]["containers"]))] + cpu(pod["spec"].get("initContainers", [])))


class Account(PodCluster):
    OWN = "until the account is right"

    def __init__(self, arguments):
        super().__init__(arguments)
        self.changes = arguments.changes

    def misses(self, row):
        return None

    def up(self):
        kubectl("delete", "daemonset", "--all")
        super().up()

    def wanted(self, gangs, declared):
        """The cores that shadow jobs are to hold on each node: what all pods request, beyond the CPUs that Flux does not declare, or the
        tolerance, less the cores that the jobs of gangs hold. Here, each pod of a gang requests its whole slot."""
        pods = json.loads(kubectl("get", "pods", "-A", "-o", "json"))["items"]
        used = Counter()
        for pod in pods:
            if pod["spec"].get("nodeName") and pod["status"]["phase"] in ("Pending", "Running"):
                used[pod["spec"]["nodeName"]] += requested(pod)
        wanted = {}
        for node in json.loads(kubectl("get", "nodes", "-o", "json"))["items"]:
            name, flux = node["metadata"]["name"], declared[node["metadata"]["name"]]
            exempt = max(TOLERANCE, milli(node["status"]["allocatable"]["cpu"]) - 1000 * flux)
            wanted[name] = max(0, min(flux, math.ceil(max(0, used[name] - exempt) / 1000)) - gangs[name])
        return {node: cores for node, cores in wanted.items() if cores}

    def is_right(self):
        declared, gangs, shadows = Counter(), Counter(), Counter()
        for name, node, cores in map(str.split, self.flux("python", "-c", HELD).splitlines()):
            if name == "-":
                declared[node] += int(cores)
            elif name.startswith(SHADOW):
                shadows[node] += int(cores)
            elif "/" in name:
                gangs[node] += int(cores)
        for line in self.flux("jobs", "-n", "--filter=pending", "-o", "{name} {ntasks}").splitlines():
            name, cores = line.split()
            if name.startswith(SHADOW):
                shadows[name.removeprefix(SHADOW)] += int(cores)
        wanted = self.wanted(gangs, declared)
        return dict(shadows) == wanted or f"shadow jobs hold or wait for {dict(shadows)}, wanted is {wanted}"

    def until_right(self, limit):
        begin = time.monotonic()
        until("shadow jobs for what other pods use", self.is_right, limit)
        return time.monotonic() - begin

    def web(self, replicas):
        self.controller("Deployment", "web", replicas, schedulerName="default-scheduler")

    def daemons(self, version):
        template = self.template("1000000", schedulerName="default-scheduler")
        template["containers"][0]["resources"] = {"requests": {"cpu": "200m"}}
        labels = {"app": "daemon"}
        spec = {"selector": {"matchLabels": labels}, "updateStrategy": {"rollingUpdate": {"maxUnavailable": "50%"}}}
        spec["template"] = {"metadata": {"labels": labels, "annotations": {"version": str(version)}}, "spec": template}
        self.apply("DaemonSet", "apps/v1", "daemon", spec)

    def change(self, number):
        """Something that changes what pods or jobs use."""
        some = lambda most: random.randint(0, most)
        kind = random.choice(["web", "web", "service", "gang", "host", "daemons", "cordon", "forced"])
        if kind == "web":
            self.web(some(self.room))
        elif kind == "service":
            self.controller("Deployment", "service", some(self.room // 2))
        elif kind == "gang":
            self.gang(f"g{number}", 1 + some(2), str(3 + some(7)))
        elif kind == "host":
            self.flux("submit", "-n1", "-o", "cpu-affinity=off", "sleep", str(2 + some(6)))
        elif kind == "daemons":
            self.daemons(number)
        elif kind == "cordon":
            node = random.choice(self.nodes)
            kubectl(random.choice(["cordon", "uncordon"]), node)
        elif pods := [name for name in self.running() if name.startswith("web-")]:
            kubectl("delete", "pod", random.choice(pods), "--grace-period=0", "--force")

    def mix(self):
        """Pods and jobs of all kinds come and go: soon after some changes the account is right."""
        longest = 0
        for number in range(self.changes):
            self.change(number)
            if number % 3 == 2:
                # A pod that was deleted by force holds its cores for ten seconds.
                longest = max(longest, self.until_right(20))
        kubectl("uncordon", *self.nodes)
        kubectl("delete", "daemonset", "--all")
        kubectl("delete", "deployments,pods", "--all")
        until("nothing held", lambda: self.held() == 0 or self.flux("jobs"), 60)
        return longest

    def beside(self, do):
        """Pods of both schedulers run; then `do`. They run on, and the account is right again."""
        self.web(self.room // 2)
        until("web pods Running", lambda: len(self.running()) == self.room // 2 or len(self.running()))
        self.until_right(20)
        self.controller("Deployment", "service", 1)
        until("a pod of Flux Running", lambda: len(self.running()) == self.room // 2 + 1 or list(self.running()))
        before = self.running()
        begin = time.monotonic()
        do(self.instance()["status"]["lead"])
        until("the lead's agent Ready", lambda: all(phase == "Online" for phase in self.phases().values()) or self.phases())
        self.until_right(60)
        seconds = time.monotonic() - begin
        # Jobs hold a core for each pod that runs.
        if self.held() < len(before):
            raise Wrong(f"{len(before)} pods run, and jobs hold {self.held()} cores")
        self.run_on(before)
        return seconds

    def agent_killed(self):
        return self.beside(lambda lead: self.signal(lead, "KILL", AGENT))

    def broker_terminated(self):
        return self.beside(lambda lead: self.signal(lead, "TERM", BROKER))

    def broker_killed(self):
        return self.beside(lambda lead: self.signal(lead, "KILL", BROKER))


ROWS = {
    "a mix": Account.mix,
    "kill -9 of the lead's agent": Account.agent_killed,
    "SIGTERM to the lead's broker": Account.broker_terminated,
    "kill -9 of the lead's broker": Account.broker_killed,
}


def add_arguments(parser):
    parser.add_argument("--image", required=True)
    parser.add_argument("--cpu", default="1")
    parser.add_argument("--pods-per-node", type=int, default=1)
    parser.add_argument("--changes", type=int, default=60)
    parser.set_defaults(api_server=None)


main(__doc__, ROWS, Account, add_arguments)
