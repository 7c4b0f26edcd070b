#!/usr/bin/env python3
"""Pods of another scheduler beside pods and jobs of Flux on a real cluster: do the jobs other-pods/NODE hold what those pods use, and do the
pods flux-host-jobs/NODE request what jobs use? Kubelets must be of Kubernetes 1.33 or later.

    KUBECONFIG=… scripts/cluster_account.py --manifest FILE --node-shell 'COMMAND {node}' --image IMAGE [--cpu 1] [--changes 60]
        [--runs 5] [--rows WORD,…] [--api-server 'COMMAND {action}']

IMAGE and the other arguments are those of cluster_pods.py; a core is one CPU here. Use a cluster that can be damaged; namespace default is
emptied."""

import json, math, random, threading, time
from collections import Counter

from cluster import Wrong, kubectl, main, until
from pod_cluster import AGENT, BROKER, RESOURCES, PodCluster

# Thousandths of a CPU: the default of spec.pods.tolerance.
TOLERANCE = 500
SHADOW = "other-pods/"
PLACEHOLDERS = "flux-host-jobs"
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
        # Jobs that ended with the lead's broker.
        self.lost = set()

    def misses(self, row):
        return None

    def up(self):
        kubectl("delete", "daemonset", "--all")
        super().up()

    def look(self):
        """By kind and node: `declared`, `hosts`, `gangs` and `shadows` in cores; `pods`, `placeholders` and `allocatable` in thousandths of a CPU;
        `cordoned` is a set of nodes."""
        found = {kind: Counter() for kind in ["declared", "hosts", "gangs", "shadows"]}
        for name, node, cores in map(str.split, self.flux("python", "-c", HELD).splitlines()):
            kind = "declared" if name == "-" else "shadows" if name.startswith(SHADOW) else "gangs" if "/" in name else "hosts"
            found[kind][node] += int(cores)
        found["pods"], found["placeholders"], found["allocatable"] = Counter(), Counter(), {}
        for pod in json.loads(kubectl("get", "pods", "-A", "-o", "json"))["items"]:
            if pod["spec"].get("nodeName") and pod["status"]["phase"] in ("Pending", "Running"):
                kind = "placeholders" if pod["metadata"]["namespace"] == PLACEHOLDERS else "pods"
                found[kind][pod["spec"]["nodeName"]] += requested(pod)
        found["cordoned"] = set()
        for node in json.loads(kubectl("get", "nodes", "-o", "json"))["items"]:
            name = node["metadata"]["name"]
            found["allocatable"][name] = milli(node["status"]["allocatable"]["cpu"])
            if node["spec"].get("unschedulable"):
                found["cordoned"].add(name)
        return found

    @staticmethod
    def wanted(look):
        """The cores that shadow jobs are to hold on each node: what all pods request, beyond the CPUs that Flux does not declare, or the
        tolerance, less the cores that the jobs of gangs hold. Here, each pod of a gang requests its whole slot."""
        wanted = {}
        for node, allocatable in look["allocatable"].items():
            flux = look["declared"][node]
            exempt = max(TOLERANCE, allocatable - 1000 * flux)
            used = min(flux, math.ceil(max(0, look["pods"][node] - exempt) / 1000))
            wanted[node] = max(0, used - look["gangs"][node])
        return {node: cores for node, cores in wanted.items() if cores}

    def is_right(self):
        look = self.look()
        shadows = Counter(look["shadows"])
        for line in self.flux("jobs", "-n", "--filter=pending", "-o", "{name} {ntasks}").splitlines():
            name, cores = line.split()
            if name.startswith(SHADOW):
                shadows[name.removeprefix(SHADOW)] += int(cores)
        wanted = self.wanted(look)
        if dict(shadows) != wanted:
            return f"shadow jobs hold or wait for {dict(shadows)}, wanted is {wanted}"
        for node, allocatable in look["allocatable"].items():
            asks, hosts = look["placeholders"][node], 1000 * look["hosts"][node]
            most = max(1, min(hosts, allocatable - look["pods"][node]))
            # Room that other pods have left is taken a minute later; by less than the tolerance it is no overlap.
            least = max(1, most - TOLERANCE)
            is_right = least <= asks <= most or (asks == 0 and node in look["cordoned"]) if hosts else asks <= 1
            if not is_right:
                return f"host jobs have {hosts}m of {node}, and its placeholder pod asks for {asks}m"
        return True

    def watch_overlaps(self, ended, found):
        """Once a second, while a mix runs: where pods and host jobs together have more than the node, for how long, and whether that is
        reported within five seconds."""
        since = {}
        while not ended.wait(1):
            try:
                look, status = self.look(), self.instance()["status"]
            except (Wrong, ValueError, KeyError):
                continue
            is_told = status.get("pods", {}).get("overlappingCores", 0) > 0
            for node, allocatable in look["allocatable"].items():
                over = look["pods"][node] + 1000 * look["hosts"][node] - allocatable - TOLERANCE
                if over <= 0:
                    since.pop(node, None)
                    continue
                if node not in since:
                    since[node] = time.monotonic()
                    found["count"] += 1
                lasted = time.monotonic() - since[node]
                found["longest"] = max(found["longest"], lasted)
                if lasted > 5 and not is_told:
                    found["untold"] += 1

    def until_right(self, limit):
        begin = time.monotonic()
        until("what each side holds of each node for the other", self.is_right, limit)
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
        kind = random.choice(["web", "web", "service", "gang", "host", "daemons", "cordon", "forced", "size"])
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
        elif kind == "size":
            self.set(size=random.choice([None, len(self.nodes) - 1]))
        elif pods := [name for name in self.running() if name.startswith("web-")]:
            kubectl("delete", "pod", random.choice(pods), "--grace-period=0", "--force")

    def fault(self, number):
        """Another process of the lead's node is ended, or the API server is gone for a while: pods run on, and the account is right again. Host
        jobs end as they would have, unless the lead's broker is ended, which costs Flux its jobs."""
        lead = self.instance()["status"]["lead"]
        faults = {
            "kill -9 of the lead's agent": lambda: self.signal(lead, "KILL", AGENT),
            "the API server away for 5 s": lambda: self.without_api_server(5),
            "SIGTERM to the lead's broker": lambda: self.signal(lead, "TERM", BROKER),
            "kill -9 of the lead's broker": lambda: self.signal(lead, "KILL", BROKER),
        }
        if not self.api_command:
            del faults["the API server away for 5 s"]
        name = list(faults)[number % len(faults)]
        # After an API server was away, controllers act late: what they are still to delete is no victim of the fault.
        until("Deployments to be as they are to be", self.have_settled, 60)
        self.until_right(20)
        before = {name: pod for name, pod in self.running().items() if name.startswith(("web-", "service-"))}
        before = {name: pod for name, pod in before.items() if "deletionTimestamp" not in pod["metadata"]}
        faults[name]()
        # kubelet starts a container that ends again and again only minutes later.
        until("the lead's agent to answer", lambda: "host" in self.flux("resource", "list") or True, 600)
        begin = time.monotonic()
        self.until_right(60)
        seconds = time.monotonic() - begin
        self.run_on(before)
        if not name.endswith("broker") and (bad := self.flux("jobs", "-n", "--filter=failed,canceled,timeout", "-o", "{id} {name} {result}")):
            ours = {job for job in bad.splitlines() if job.split()[1] == "sleep"} - self.lost
            if ours:
                raise Wrong(f"{name}: host jobs did not end as they would have: {ours}")
        elif name.endswith("broker"):
            self.lost = set(self.flux("jobs", "-n", "--filter=failed,canceled,timeout", "-o", "{id} {name} {result}").splitlines())
        print(f"{name}: right again after {seconds:.1f} s", flush=True)
        return seconds

    @staticmethod
    def have_settled():
        def has_settled(found):
            status, generation = found["status"], found["metadata"]["generation"]
            return status.get("observedGeneration") == generation and status.get("replicas", 0) == found["spec"]["replicas"]

        found = json.loads(kubectl("get", "deployments", "-o", "json"))["items"]
        return all(map(has_settled, found)) or [each["status"] for each in found]

    def without_api_server(self, seconds):
        self.api_server("stop")
        time.sleep(seconds)
        self.api_server("start")

    def mix_with_faults(self):
        return self.mix(faults=True)

    def mix(self, faults=False):
        """Pods and jobs of all kinds come and go: soon after some changes the account is right. `faults`: meanwhile agents and API servers end,
        too."""
        longest, overlaps, ended = 0, Counter(longest=0), threading.Event()
        watch = threading.Thread(target=self.watch_overlaps, args=(ended, overlaps), daemon=True)
        watch.start()
        for number in range(self.changes):
            self.change(number)
            if number % 3 == 2:
                # A pod that was deleted by force holds its cores for ten seconds.
                longest = max(longest, self.until_right(20))
            if faults and number % 15 == 14:
                longest = max(longest, self.fault(number // 15))
        ended.set()
        watch.join()
        print(f"overlaps: {overlaps['count']}, the longest {overlaps['longest']:.1f} s, looks that missed a report: {overlaps['untold']}")
        if overlaps["untold"]:
            raise Wrong(f"an overlap was not reported within 5 s: {dict(overlaps)}")
        kubectl("uncordon", *self.nodes)
        self.set(size=None)
        self.all_online()
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
        until("a core held for each pod that runs", lambda: self.held() >= len(before) or self.held(), 30)
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
    "a mix, and faults": Account.mix_with_faults,
    "kill -9 of the lead's agent": Account.agent_killed,
    "SIGTERM to the lead's broker": Account.broker_terminated,
    "kill -9 of the lead's broker": Account.broker_killed,
}


def add_arguments(parser):
    parser.add_argument("--image", required=True)
    parser.add_argument("--cpu", default="1")
    parser.add_argument("--pods-per-node", type=int, default=1)
    parser.add_argument("--changes", type=int, default=60)
    parser.add_argument("--api-server", help="a command with {action}, which is stop or start")


main(__doc__, ROWS, Account, add_arguments)
