"""Pods for Flux on a real cluster: what is there, and what can be made; for cluster_pods.py and cluster_account.py."""

import json, shlex

from cluster import Cluster, Wrong, kubectl, ours, run, until, until_is

GROUP = "distribute.flux-framework.org"
FOREVER = "1000000"
# To the oldest process whose comm or cmdline begins so: what it has just forked has the same line.
SIGNAL = r"""pid=$(for process in /proc/[0-9]*; do line=$(tr '\0' ' ' < $process/{file}); case $line in {pattern}*)
echo $(sed 's/.*) //' $process/stat | cut -d ' ' -f 20) ${{process#/proc/}};; esac; done 2>/dev/null | sort -n | head -n 1 | cut -d ' ' -f 2)
[ -n "$pid" ] && kill -{name} $pid"""
# Start of a script for the lead: defines `declared`, `nodes` (name by rank) and `executions`, a job and its R for each job that runs. A
# job's nodelist need not be in the order of its ranks, so the names come from the instance's.
RESOURCES = """import flux
from flux.hostlist import Hostlist
from flux.idset import IDset
from flux.job import JobList, job_kvs_lookup
from flux.kvs import get
handle = flux.Flux()
declared = get(handle, "resource.R")["execution"]
nodes = dict(zip(sorted(rank for entry in declared["R_lite"] for rank in IDset(entry["rank"])), Hostlist(declared["nodelist"])))
jobs = JobList(handle, filters=["running"], max_entries=0).jobs()
executions = [(job, job_kvs_lookup(handle, job.id, keys=["R"], decode=True)["R"]["execution"]) for job in jobs]
"""
# Each core of each job that runs: the job, the node, the rank and the core.
GIVEN = RESOURCES + """
for job, execution in executions:
    for entry in execution["R_lite"]:
        for rank in IDset(entry["rank"]):
            for core in IDset(entry["children"]["core"]):
                print(job.id.f58plain, nodes[rank], rank, core)"""
AGENT, BROKER, KUBELET = ("cmdline", "/flux-distribute?agent"), ("cmdline", "broker?--config-path"), ("comm", "kubelet")


class PodCluster(Cluster):
    """Namespace default has opted in."""

    OWN = "until all cores are held again"

    def __init__(self, arguments):
        super().__init__(arguments)
        self.image, self.cpu, self.api_command = arguments.image, arguments.cpu, arguments.api_server
        self.per_node = arguments.pods_per_node
        self.room = self.per_node * len(self.nodes)

    def api_server(self, action):
        run(*shlex.split(self.api_command.format(action=action)))

    def up(self):
        # A run that failed may have left them so.
        kubectl("uncordon", *self.nodes)
        super().up()
        kubectl("apply", "-f", "deploy/pods.yaml")
        role = ["--clusterrole=flux-bridge", "--serviceaccount=flux-distribute:install-flux"]
        if not kubectl("get", "rolebinding", "flux-bridge", "--ignore-not-found"):
            kubectl("create", "rolebinding", "flux-bridge", *role)
        for kind in ["deployments", "replicasets", "statefulsets", "jobs", "pods"]:
            kubectl("delete", kind, "--all", "--wait=false")
        until_is(0, "the last run's cores free", self.held)
        until_is({}, "no pods", self.pods)

    def down(self):
        """The bridge's rights first: see docs/operations.md."""
        kubectl("delete", "rolebinding", "flux-bridge", "--ignore-not-found")
        kubectl("delete", "-f", "deploy/pods.yaml", "--ignore-not-found")
        super().down()

    def signal(self, node, name, process):
        file, pattern = process
        self.on(node, SIGNAL.format(file=file, pattern=pattern, name=name))

    # What is there.

    def pods(self):
        found = json.loads(kubectl("get", "pods", "-o", "json"))["items"]
        return {pod["metadata"]["name"]: pod for pod in found}

    def held(self):
        """Cores that Flux has given out: a pod has one."""
        return int(self.flux("resource", "list", "-s", "allocated", "-no", "{ncores}") or 0)

    def have_own_cores(self, count, are_fresh=True):
        """So many pods run. Their nodes and cores are those of R of all jobs: each has one, and no job has another. What a
        restart has given again may be another core of the same node, which the pod's annotation does not tell. The cores of a pod that
        is gone may be held for a moment longer."""
        self.until_running(count)
        pods, given = self.running(), {}

        def no_others():
            given.clear()
            given.update(self.given())
            nodes, of_jobs = sorted(pod["spec"]["nodeName"] for pod in pods.values()), sorted(node for node, _ in given)
            return nodes == of_jobs or f"the pods' nodes are {nodes}, those of the cores that jobs have are {of_jobs}"

        until("no cores held but those of the pods", no_others, 5)
        for name, pod in pods.items() if are_fresh else ():
            record = json.loads(pod["metadata"]["annotations"][f"{GROUP}/job"])
            found = given.pop((pod["spec"]["nodeName"], record["cores"]), None)
            if found != (record["id"].replace("ƒ", "f"), record["rank"]):
                raise Wrong(f"{name} is on {pod['spec']['nodeName']} with {record}, R is of {found}, the other cores are of {given}")

    def given(self):
        """The job and the rank of each core of each node that a job has."""
        given = {}
        for job, node, rank, core in map(str.split, self.flux("python", "-c", GIVEN).splitlines()):
            if given.setdefault((node, core), (job, int(rank))) != (job, int(rank)):
                raise Wrong(f"core {core} of {node} is in two jobs: {given}")
        return given

    def running(self):
        return {name: pod for name, pod in self.pods().items() if pod["status"]["phase"] == "Running"}

    def until_running(self, count):
        until_is(count, "so many pods Running", lambda: len(self.running()))

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

    def template(self, seconds, **more):
        container = {"name": "main", "image": self.image, "imagePullPolicy": "IfNotPresent", "args": [seconds, "0"]}
        container["resources"] = {"requests": {"cpu": self.cpu}}
        return {"schedulerName": "flux", "terminationGracePeriodSeconds": 2, "containers": [container]} | more

    @staticmethod
    def made(kind, version, name, spec, metadata=None):
        return {"apiVersion": version, "kind": kind, "metadata": {"name": name} | (metadata or {}), "spec": spec}

    @staticmethod
    def create(*made):
        if made:
            kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": made}))

    def apply(self, *what):
        self.create(self.made(*what))

    def a_pod(self, name, seconds=FOREVER, metadata=None, **more):
        return self.made("Pod", "v1", name, self.template(seconds, restartPolicy="Never", **more), metadata)

    def pod(self, name, seconds=FOREVER, annotations=None, **more):
        self.create(self.a_pod(name, seconds, {"annotations": annotations or {}}, **more))

    def members(self, name, size, seconds=FOREVER, **more):
        """Pods of one gang."""
        metadata = {"annotations": {f"{GROUP}/gang": name, f"{GROUP}/gang-size": str(size)}, "labels": {"gang": name}}
        return [self.a_pod(f"{name}-{member}", seconds, metadata, **more) for member in range(size)]

    def gang(self, name, size, seconds=FOREVER, **more):
        self.create(*self.members(name, size, seconds, **more))

    def apart(self, name):
        """Two members, each on a node of its own."""
        own = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"gang": name}}}
        apart = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [own]}}
        return self.members(name, 2, affinity=apart)

    def controller(self, kind, name, replicas, **more):
        labels = {"app": name}
        template = {"metadata": {"labels": labels}, "spec": self.template(FOREVER, **more)}
        spec = {"replicas": replicas, "selector": {"matchLabels": labels}, "template": template}
        self.apply(kind, "apps/v1", name, spec | ({"serviceName": name} if kind == "StatefulSet" else {}))

    def job(self, name, size, indexed, seconds=FOREVER, **more):
        spec = {"completions": size, "parallelism": size, "completionMode": "Indexed" if indexed else "NonIndexed"}
        spec["template"] = {"spec": self.template(seconds, restartPolicy="Never", **more)}
        self.apply("Job", "batch/v1", name, spec)
