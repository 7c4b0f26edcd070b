"""Pods for Flux on a real cluster: what is there, and what can be made; for cluster_pods.py."""

import json, shlex

from cluster import Cluster, Wrong, kubectl, ours, run, until, until_is

GROUP = "distribute.flux-framework.org"
FOREVER = "1000000"
# To the oldest process whose comm or cmdline begins so: what it has just forked has the same line.
SIGNAL = r"""pid=$(for process in /proc/[0-9]*; do line=$(tr '\0' ' ' < $process/{file}); case $line in {pattern}*)
echo $(sed 's/.*) //' $process/stat | cut -d ' ' -f 20) ${{process#/proc/}};; esac; done 2>/dev/null | sort -n | head -n 1 | cut -d ' ' -f 2)
[ -n "$pid" ] && kill -{name} $pid"""
AGENT, BROKER, KUBELET = ("cmdline", "/flux-distribute?agent"), ("cmdline", "broker?--config-path"), ("comm", "kubelet")


class PodCluster(Cluster):
    """Namespace default has opted in."""

    OWN = "until all cores are held again"

    def __init__(self, arguments):
        super().__init__(arguments)
        self.image, self.cpu, self.api_command = arguments.image, arguments.cpu, arguments.api_server

    def api_server(self, action):
        run(*shlex.split(self.api_command.format(action=action)))

    def up(self):
        super().up()
        kubectl("apply", "-f", "deploy/pods.yaml")
        role = ["--clusterrole=flux-bridge", "--serviceaccount=flux-distribute:install-flux"]
        if not kubectl("get", "rolebinding", "flux-bridge", "--ignore-not-found"):
            kubectl("create", "rolebinding", "flux-bridge", *role)
        for node in self.nodes:
            kubectl("uncordon", node)
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
        """Nodes with cores that Flux has given out."""
        return int(self.flux("resource", "list", "-s", "allocated", "-no", "{nnodes}") or 0)

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

    def apply(self, kind, version, name, spec, metadata=None):
        made = {"apiVersion": version, "kind": kind, "metadata": {"name": name} | (metadata or {}), "spec": spec}
        kubectl("apply", "-f", "-", stdin=json.dumps(made))

    def pod(self, name, seconds=FOREVER, annotations=None, **more):
        spec = self.template(seconds, restartPolicy="Never", **more)
        self.apply("Pod", "v1", name, spec, {"annotations": annotations or {}})

    def gang(self, name, size, seconds=FOREVER, **more):
        for member in range(size):
            self.pod(f"{name}-{member}", seconds, {f"{GROUP}/gang": name, f"{GROUP}/gang-size": str(size)}, **more)

    def controller(self, kind, name, replicas):
        labels = {"app": name}
        template = {"metadata": {"labels": labels}, "spec": self.template(FOREVER)}
        spec = {"replicas": replicas, "selector": {"matchLabels": labels}, "template": template}
        self.apply(kind, "apps/v1", name, spec | ({"serviceName": name} if kind == "StatefulSet" else {}))

    def job(self, name, size, indexed, seconds=FOREVER, **more):
        spec = {"completions": size, "parallelism": size, "completionMode": "Indexed" if indexed else "NonIndexed"}
        spec["template"] = {"spec": self.template(seconds, restartPolicy="Never", **more)}
        self.apply("Job", "batch/v1", name, spec)
