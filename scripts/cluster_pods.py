#!/usr/bin/env python3
"""Pods through Flux on a real cluster of four nodes or more: kinds of controllers, restarts, an epoch change, a smaller instance and an
uninstall beside pods that must not notice.

    KUBECONFIG=… scripts/cluster_pods.py --manifest FILE --node-shell 'COMMAND {node}' --image IMAGE [--cpu 1] [--runs 5]
        [--rows WORD,…]

IMAGE has a program that sleeps for as many seconds as its first argument says. A node must have room for one pod that requests as
much CPU, and for no second one. The manifest switches spec.pods on. The other arguments are those of cluster_faults.py. Use a cluster
that can be damaged; namespace default is emptied."""

import json, time

from cluster import Cluster, Wrong, kubectl, main, ours, until

GROUP = "distribute.flux-framework.org"
FOREVER = "1000000"
# Of the first broker or the agent on a node, without what these have just forked.
SIGNAL = r"""for process in /proc/[0-9]*; do line=$(tr '\0' ' ' < $process/cmdline); case $line in %s*)
kill -%s ${process#/proc/}; exit;; esac; done 2>/dev/null; exit 1"""


class Pods(Cluster):
    OWN = "until all cores are held again"

    def __init__(self, arguments):
        super().__init__(arguments)
        self.image, self.cpu = arguments.image, arguments.cpu

    def misses(self, row):
        return None

    def up(self):
        super().up()
        kubectl("apply", "-f", "deploy/pods.yaml")
        role = ["--clusterrole=flux-bridge", "--serviceaccount=flux-distribute:install-flux"]
        if not kubectl("get", "rolebinding", "flux-bridge", "--ignore-not-found"):
            kubectl("create", "rolebinding", "flux-bridge", *role)
        for kind in ["deployments", "replicasets", "statefulsets", "jobs", "pods"]:
            kubectl("delete", kind, "--all", "--wait=false")
        until("the last run's cores free", lambda: self.held() == 0 or self.held())
        until("no pods", lambda: not self.pods() or list(self.pods()))

    # What is there.

    def pods(self):
        found = json.loads(kubectl("get", "pods", "-o", "json"))["items"]
        return {pod["metadata"]["name"]: pod for pod in found}

    def held(self):
        """Nodes with cores that Flux has given out."""
        return int(self.flux("resource", "list", "-s", "allocated", "-no", "{nnodes}") or 0)

    def running(self):
        return {name: pod for name, pod in self.pods().items() if pod["status"]["phase"] == "Running"}

    def until_running(self, count):
        until(f"{count} pods Running", lambda: len(self.running()) >= count or list(self.running()))

    @staticmethod
    def identity(pod):
        restarts = sum(container["restartCount"] for container in pod["status"].get("containerStatuses", []))
        return pod["metadata"]["uid"], pod["spec"]["nodeName"], pod["status"]["phase"], restarts

    def run_on(self, before):
        """Pods that ran before still do: the same ones, on the same nodes, without a restart."""
        now = self.pods()
        for name, pod in before.items():
            if name not in now or self.identity(pod) != self.identity(now[name]):
                raise Wrong(f"{name}: {self.identity(pod)} before, {now.get(name, {}).get('status')} now")

    def queue(self):
        """The gangs that wait, in Flux's order."""
        return self.flux("jobs", "-n", "--filter=pending", "-o", "{name}").split()

    # What is made.

    def template(self, seconds):
        container = {"name": "main", "image": self.image, "imagePullPolicy": "IfNotPresent", "args": [seconds, "0"]}
        container["resources"] = {"requests": {"cpu": self.cpu}}
        return {"schedulerName": "flux", "terminationGracePeriodSeconds": 2, "containers": [container]}

    def apply(self, kind, version, name, spec, metadata=None):
        made = {"apiVersion": version, "kind": kind, "metadata": {"name": name} | (metadata or {}), "spec": spec}
        kubectl("apply", "-f", "-", stdin=json.dumps(made))

    def pod(self, name, seconds=FOREVER, annotations=None):
        spec = self.template(seconds) | {"restartPolicy": "Never"}
        self.apply("Pod", "v1", name, spec, {"annotations": annotations or {}})

    def gang(self, name, size):
        for member in range(size):
            self.pod(f"{name}-{member}", annotations={f"{GROUP}/gang": name, f"{GROUP}/gang-size": str(size)})

    def controller(self, kind, name, replicas):
        labels = {"app": name}
        template = {"metadata": {"labels": labels}, "spec": self.template(FOREVER)}
        spec = {"replicas": replicas, "selector": {"matchLabels": labels}, "template": template}
        self.apply(kind, "apps/v1", name, spec | ({"serviceName": name} if kind == "StatefulSet" else {}))

    def job(self, name, size, indexed):
        spec = {"completions": size, "parallelism": size, "completionMode": "Indexed" if indexed else "NonIndexed"}
        spec["template"] = {"spec": self.template(FOREVER) | {"restartPolicy": "Never"}}
        self.apply("Job", "batch/v1", name, spec)

    # The rows.

    def kinds(self):
        """Each bound pod has cores of its own, on the node where Flux has given them out."""
        self.pod("bare")
        self.job("work", 1, False)
        self.controller("Deployment", "deployment", 1)
        self.until_running(3)
        kubectl("delete", "pod", "bare")
        self.controller("StatefulSet", "stateful", 1)
        self.controller("ReplicaSet", "replicas", 1)
        self.until_running(4)
        kubectl("delete", "deployment,replicaset,statefulset", "--all")
        self.job("gang", 3, True)
        self.until_running(4)
        records, taken = {}, {}
        for name, pod in self.running().items():
            if "deletionTimestamp" in pod["metadata"]:
                continue
            record = json.loads(pod["metadata"]["annotations"][f"{GROUP}/job"])
            records[name] = record
            r = json.loads(self.flux("job", "info", record["id"], "R"))["execution"]
            nodes = self.flux("hostlist", "-e", *r["nodelist"]).split()
            core = (pod["spec"]["nodeName"], record["cores"])
            if core[0] not in nodes or taken.setdefault(core, name) != name:
                raise Wrong(f"{name} has {record}, R is {r}, taken are {taken}")
        if len(records) < 4:
            raise Wrong(f"{records}")

    def restart(self, do, cores_are_given_again=True):
        """Two gangs run and two wait; then `do`."""
        count = len(self.nodes) // 2
        self.gang("first", count)
        self.gang("second", len(self.nodes) - count)
        self.until_running(len(self.nodes))
        for name in ["third", "fourth"]:
            self.gang(name, count)
            until(f"{name} queued", lambda name=name: f"default/{name}" in self.queue() or self.queue())
        before, queue, lead = self.running(), self.queue(), self.instance()["status"]["lead"]
        begin = time.monotonic()
        do(lead)

        def is_as_before():
            jobs = self.flux("jobs", "-n", "--filter=running", "-o", "{name} {urgency}").splitlines()
            are_new = not cores_are_given_again or all(job.endswith(" 31") for job in jobs)
            return self.held() == len(self.nodes) and are_new and self.queue() == queue or (jobs, self.queue())

        until("all as before", is_as_before)
        seconds = time.monotonic() - begin
        self.run_on(before)
        for member in range(count):
            kubectl("delete", "pod", f"first-{member}", "--wait=false")
        until("the next gang bound", lambda: "third-0" in self.running() or list(self.running()))
        return seconds

    def agent_killed(self):
        return self.restart(lambda lead: self.on(lead, SIGNAL % ("/flux-distribute?agent", "KILL")), False)

    def broker_terminated(self):
        return self.restart(lambda lead: self.on(lead, SIGNAL % ("broker?--config-path", "TERM")))

    def broker_killed(self):
        return self.restart(lambda lead: self.on(lead, SIGNAL % ("broker?--config-path", "KILL")))

    def next_epoch(self):
        def do(_):
            epoch = self.instance()["status"]["epoch"]
            ours("annotate", "fluxinstance", "flux", "--overwrite", f"{GROUP}/restart={time.time()}")
            until("the next epoch", lambda: self.instance()["status"]["epoch"] > epoch)

        return self.restart(do)

    def fewer_nodes(self):
        """A gang is waited for, a pod by itself is not."""
        most = len(self.nodes)
        self.controller("Deployment", "service", most - 2)
        self.gang("gang", 2)
        self.until_running(most)
        before = self.running()
        on_nodes = {before[f"gang-{member}"]["spec"]["nodeName"] for member in range(2)}
        ranks = json.loads(ours("get", "fluxnodes", "-o", "json"))["items"]
        ranks = {node["metadata"]["name"]: node["spec"]["rank"] for node in ranks}
        size = max(1, max(ranks[node] for node in on_nodes))

        def is_of(size):
            return self.instance()["status"]["size"] == size or self.instance()["status"]

        try:
            self.set(size)
            time.sleep(5)
            if self.instance()["status"]["size"] == size:
                raise Wrong("a member has left under a gang")
            self.run_on(before)
            kubectl("delete", "pod", "gang-0", "gang-1")
            before = {name: pod for name, pod in before.items() if not name.startswith("gang")}
            until(f"size {size}", lambda: is_of(size))
            self.set(1)
            until("size 1", lambda: is_of(1))
            self.run_on(before)
        finally:
            self.set(None)

    def set(self, size):
        ours("patch", "fluxinstance", "flux", "--type=merge", "-p", json.dumps({"spec": {"size": size}}))

    def uninstalled(self):
        """Beside a service that never ends; and what is installed next holds its cores again."""
        self.controller("Deployment", "service", len(self.nodes))
        self.until_running(len(self.nodes))
        before = self.running()
        ours("delete", "fluxinstance", "flux")
        until("hosts clean", lambda: not self.phases() or self.phases())
        self.run_on(before)
        kubectl("apply", "-f", self.manifest)
        self.all_online()
        begin = time.monotonic()
        until("all cores held", lambda: self.held() == len(self.nodes) or self.held())
        self.run_on(before)
        return time.monotonic() - begin


ROWS = {
    "six kinds of pods": Pods.kinds,
    "kill -9 of the lead's agent": Pods.agent_killed,
    "SIGTERM to the lead's broker": Pods.broker_terminated,
    "kill -9 of the lead's broker": Pods.broker_killed,
    "an epoch change": Pods.next_epoch,
    "fewer nodes": Pods.fewer_nodes,
    "uninstall and install": Pods.uninstalled,
}


def add_arguments(parser):
    parser.add_argument("--image", required=True)
    parser.add_argument("--cpu", default="1")


main(__doc__, ROWS, Pods, add_arguments)
