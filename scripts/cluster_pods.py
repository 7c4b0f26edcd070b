#!/usr/bin/env python3
"""Pods through Flux on a real cluster of four nodes or more: kinds of controllers, gangs, refusals, deletions, restarts, an epoch
change, a smaller instance and an uninstall, beside pods that must not notice.

    KUBECONFIG=… scripts/cluster_pods.py --manifest FILE --node-shell 'COMMAND {node}' --image IMAGE [--cpu 1]
        [--power 'COMMAND {action} {node}'] [--api-server 'COMMAND {action}'] [--runs 5] [--rows WORD,…]

IMAGE has a program that writes a line and sleeps for as many seconds as its first argument says. A node must have room for one pod
that requests as much CPU, and for no second one. ConfigMap flux-default of the manifest switches spec.pods on. The action of
--api-server is stop or start. The other arguments are those of cluster_faults.py. Use a cluster that can be damaged; namespace default
is emptied."""

import datetime, json, random, shlex, statistics, time
from concurrent.futures import ThreadPoolExecutor

from cluster import Cluster, Wrong, kubectl, main, ours, run, until

GROUP = "distribute.flux-framework.org"
FOREVER = "1000000"
# Of the first broker or the agent on a node, without what these have just forked.
SIGNAL = r"""for process in /proc/[0-9]*; do line=$(tr '\0' ' ' < $process/cmdline); case $line in %s*)
kill -%s ${process#/proc/}; exit;; esac; done 2>/dev/null; exit 1"""

KUBELET = r"""for process in /proc/[0-9]*; do read -r name < $process/comm; case $name in kubelet)
kill -%s ${process#/proc/}; exit;; esac; done 2>/dev/null; exit 1"""


class Pods(Cluster):
    OWN = "until all cores are held again"

    def __init__(self, arguments):
        super().__init__(arguments)
        self.image, self.cpu, self.api_command = arguments.image, arguments.cpu, arguments.api_server

    def misses(self, row):
        if row in (Pods.lead_without_power, Pods.node_down) and not self.power_command:
            return "--power"
        return "--api-server" if row == Pods.api_server_gone and not self.api_command else None

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

    def pairs(self):
        """Gangs of two on all nodes, and as many that wait."""
        count = len(self.nodes) // 2
        for number in range(count):
            self.gang(f"run{number}", 2)
        if len(self.nodes) % 2:
            self.pod("single")
        self.until_running(len(self.nodes))
        for number in range(count):
            name = f"wait{number}"
            self.gang(name, 2)
            until(f"{name} queued", lambda name=name: f"default/{name}" in self.queue() or self.queue())

    def restart(self, do, cores_are_given_again=True):
        """Gangs run and gangs wait; then `do`. Only the pods on the node whose name it returns may notice."""
        self.pairs()
        before, queue, lead = self.running(), self.queue(), self.instance()["status"]["lead"]
        begin = time.monotonic()
        lost = do(lead)
        before = {name: pod for name, pod in before.items() if pod["spec"]["nodeName"] != lost}

        def is_as_before():
            jobs = self.flux("jobs", "-n", "--filter=running", "-o", "{name} {urgency}").splitlines()
            are_new = not cores_are_given_again or all(job.endswith(" 31") for job in jobs)
            are_held = len(before) <= self.held() == len(self.running())
            return are_held and are_new and self.queue() == queue or (jobs, self.queue())

        until("all as before", is_as_before)
        seconds = time.monotonic() - begin
        self.run_on(before)
        self.the_next_gang_runs(before)
        return seconds

    def the_next_gang_runs(self, before):
        """The first of those that wait, once two nodes are free."""
        kubectl("delete", "pod", "run0-0", "run0-1", "--wait=false")
        until("the next gang bound", lambda: {"wait0-0", "wait0-1"} <= self.running().keys() or list(self.running()))
        self.run_on({name: pod for name, pod in before.items() if not name.startswith("run0-")})
        until("no job without its pods", self.has_no_orphans, 30)

    def has_no_orphans(self):
        jobs = set(self.flux("jobs", "-n", "--filter=running,pending", "-o", "{name}").split())
        names = {f"default/{name}" for name in self.pods()}
        orphans = {job for job in jobs if not any(name == job or name.startswith(f"{job}-") for name in names)}
        return not orphans or orphans

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

    def lead_without_power(self):
        def do(lead):
            self.power("kill", lead)
            time.sleep(5)
            self.power("start", lead)
            return lead

        return self.restart(do)

    def api_server_gone(self):
        def do(_):
            self.api_server("stop")
            time.sleep(30)
            self.api_server("start")

        return self.restart(do, False)

    def node_down(self):
        """A broker's restart waits for no node; of a gang elsewhere, one node is cordoned and the other one down."""
        self.pairs()
        before, lead = self.running(), self.instance()["status"]["lead"]
        on = {number: [before[f"run{number}-{member}"]["spec"]["nodeName"] for member in range(2)] for number in (0, 1)}
        free, (cordoned, down) = (0, on[1]) if lead not in on[1] else (1, on[0])
        kubectl("cordon", cordoned)
        self.power("kill", down)
        try:
            self.on(lead, SIGNAL % ("broker?--config-path", "KILL"))
            begin = time.monotonic()
            kubectl("delete", "pod", f"run{free}-0", f"run{free}-1", "--wait=false")
            until("the next gang bound", lambda: {"wait0-0", "wait0-1"} <= self.running().keys() or list(self.running()))
            seconds = time.monotonic() - begin
        finally:
            self.power("start", down)
            kubectl("uncordon", cordoned)
        staying = {name: pod for name, pod in before.items() if name.startswith("run") and not name.startswith(f"run{free}-")}
        self.run_on({name: pod for name, pod in staying.items() if pod["spec"]["nodeName"] != down})
        until("the cores of all that run held", lambda: self.held() == len(self.running()) or self.held())
        until("no job without its pods", self.has_no_orphans, 30)
        return seconds

    def join(self):
        """A node joins while gangs end; then a core of each node is there to be had."""
        most = len(self.nodes)
        self.set(most - 1)
        until("a node less", lambda: self.instance()["status"]["size"] == most - 1)
        try:
            for number in range(3 * most):
                self.gang(f"short{number}", 2, str(random.randint(1, 3)))
                if number == most:
                    self.set(None)
        finally:
            self.set(None)
        until("all gangs done", lambda: self.are_done("short") or list(self.running()), 300)
        self.controller("Deployment", "service", most)
        self.until_running(most)

    def are_done(self, prefix):
        phases = {pod["status"]["phase"] for name, pod in self.pods().items() if name.startswith(prefix)}
        if "Failed" in phases:
            raise Wrong("a pod has failed")
        return phases == {"Succeeded"}

    def gangs(self):
        """Fifty gangs end, where the default scheduler stops at two of which each has a part of the nodes."""
        most, seconds = len(self.nodes), 3

        def mixed(sizes, **more):
            for member in range(max(sizes)):
                for number, size in enumerate(sizes):
                    if member < size:
                        annotations = {f"{GROUP}/gang": f"g{number}", f"{GROUP}/gang-size": str(size)}
                        self.pod(f"g{number}-{member}", annotations=annotations, **more)

        mixed([most - 1, most - 1], schedulerName="default-scheduler")
        self.until_running(most)
        # A gang that is whole would end, and make room: none is.
        for number in range(2):
            if len([name for name in self.running() if name.startswith(f"g{number}-")]) == most - 1:
                raise Wrong("the default scheduler has bound a gang as a whole")
        kubectl("delete", "pods", "--all")
        sizes = [random.randint(1, most) for _ in range(50)]
        begin = time.monotonic()
        mixed(sizes, seconds=str(seconds))
        until("fifty gangs done", lambda: self.are_done("g") or list(self.running()), 900)
        took = time.monotonic() - begin
        skews = []
        for number, size in enumerate(sizes):
            lines = [kubectl("logs", "--timestamps", f"g{number}-{member}").split()[0] for member in range(size)]
            # Python reads no more than microseconds.
            starts = [datetime.datetime.fromisoformat(line.split(".")[0] + line[-1:].replace("Z", "+00:00")).timestamp()
                      + float("0." + line.split(".")[1].rstrip("Z")) for line in lines]
            skews.append(max(starts) - min(starts))
        least = sum(sizes) * seconds / most
        print(f"measured: 50 gangs of {sum(sizes)} pods, skew of a gang's start: median {statistics.median(skews):.2f} s, "
              f"{took:.0f} s in all, {took / least:.1f} times what the pods' own {seconds} s take on {most} nodes", flush=True)

    def refused(self):
        """kubelet refuses a member of a Job three times: the others stay, and the Job completes."""
        most, label = len(self.nodes), f"test.{GROUP}/here"
        target = next(node for node in self.nodes if node != self.instance()["status"]["lead"])
        kubelet = lambda signal: self.on(target, KUBELET % signal)
        kubectl("label", "nodes", "--all", "--overwrite", f"{label}=yes")
        kubelet("STOP")
        try:
            begin = time.monotonic()
            self.job("refused", most, True, "120", nodeSelector={label: "yes"})
            self.until_running(most - 1)
            before, refused, cores = self.running(), set(), set()
            for turn in range(4):
                fresh = lambda: [pod for pod in self.pods().values() if pod["spec"].get("nodeName") == target
                                 and pod["metadata"]["uid"] not in refused]
                until("a member bound to the node", lambda: bool(fresh()))
                pod = fresh()[0]
                name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
                cores.add(json.loads(pod["metadata"]["annotations"][f"{GROUP}/job"])["cores"])
                if turn < 3:
                    kubectl("label", "node", target, f"{label}-")
                    time.sleep(1)
                kubelet("CONT")
                if turn < 3:
                    until("a refusal", lambda name=name: self.pods()[name]["status"]["phase"] == "Failed")
                    refused.add(uid)
                    kubelet("STOP")
                    kubectl("label", "node", target, f"{label}=yes")
            self.run_on(before)
            until("the Job's end", lambda: self.the_job("refused")["status"].get("succeeded") == most, 300)
        finally:
            kubelet("CONT")
            kubectl("label", "nodes", "--all", f"{label}-")
        job = self.the_job("refused")
        if len(cores) != 1 or job["spec"]["backoffLimit"] != 6 or job["status"].get("failed") != 3:
            raise Wrong(f"cores {cores}, {job['spec']}, {job['status']}")
        print(f"measured: {time.monotonic() - begin:.0f} s with a member refused 3 times, all of them on one core", flush=True)

    def the_job(self, name):
        return json.loads(kubectl("get", "job", name, "-o", "json"))

    def deletions(self):
        """Forty pods and gangs deleted at random moments: a core is free 2 s after its pod is gone, 12 s if that was forced, and
        never while the pod runs."""
        moments = ["at once", "soon", "bound", "pulling", "running", "terminating", "forced"]

        def one(number):
            moment, size, name = random.choice(moments), random.choice([1, 1, 2, 3]), f"del{number}"
            names = [f"{name}-{member}" for member in range(size)]
            self.gang(name, size)
            get = lambda: json.loads(kubectl("get", "pod", names[0], "-o", "json"))
            if moment == "soon":
                time.sleep(random.random() * 0.3)
            if moment in ("bound", "pulling"):
                until("bound", lambda: bool(get()["spec"].get("nodeName")), 300)
            if moment == "pulling":
                time.sleep(random.random() * 0.5)
            if moment in ("running", "terminating", "forced"):
                until("running", lambda: get()["status"]["phase"] == "Running", 300)
            if moment == "terminating":
                kubectl("delete", "pod", *names, "--wait=false")
            forced = ["--grace-period=0", "--force"] if moment in ("forced", "terminating") else []
            kubectl("delete", "pod", *names, "--ignore-not-found", *forced)
            return name, moment, time.time()

        with ThreadPoolExecutor(8) as pool:
            deleted = [pool.submit(one, number) for number in range(40)]
            while not all(each.done() for each in deleted):
                self.runs_on_its_cores()
            deleted = [each.result() for each in deleted]
        until("all cores free", lambda: self.held() == 0 or self.held())
        ended = {}
        for line in self.flux("jobs", "-a", "-n", "--count=0", "-o", "{name} {t_inactive}").splitlines():
            name, at = line.rsplit(None, 1)
            ended[name] = max(float(at), ended.get(name, 0))
        took = [(ended.get(f"default/{name}", gone) - gone, moment, name) for name, moment, gone in deleted]
        late = [each for each in took if each[0] > (12 if each[1] in ("forced", "terminating") else 2)]
        print(f"measured: cores free after the pod is gone: {max(took)}; the others at most "
              f"{max(each for each in took if each[1] not in ('forced', 'terminating'))}", flush=True)
        if late:
            raise Wrong(f"late: {late}")

    def runs_on_its_cores(self):
        """No node that has a pod which runs all the while is free for Flux."""
        before = {pod["metadata"]["uid"]: pod["spec"]["nodeName"] for pod in self.running().values()}
        held = set(self.flux("hostlist", "-e", self.flux("resource", "list", "-s", "allocated", "-no", "{nodelist}")).split())
        after = {pod["metadata"]["uid"] for pod in self.running().values()}
        if early := {node for uid, node in before.items() if uid in after} - held:
            raise Wrong(f"free under a pod that runs: {early}")

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
        before, again = self.running(), self.instance()
        ours("delete", "fluxinstance", "flux")
        until("hosts clean", lambda: not self.phases() or self.phases())
        self.run_on(before)
        self.apply("FluxInstance", f"{GROUP}/v1alpha1", "flux", again["spec"], {"namespace": again["metadata"]["namespace"]})
        self.all_online()
        begin = time.monotonic()
        until("all cores held", lambda: self.held() == len(self.nodes) or self.held())
        self.run_on(before)
        return time.monotonic() - begin


ROWS = {
    "six kinds of pods": Pods.kinds,
    "gangs that deadlock": Pods.gangs,
    "a member refused": Pods.refused,
    "deletions": Pods.deletions,
    "a join": Pods.join,
    "kill -9 of the lead's agent": Pods.agent_killed,
    "SIGTERM to the lead's broker": Pods.broker_terminated,
    "kill -9 of the lead's broker": Pods.broker_killed,
    "power of the lead's node": Pods.lead_without_power,
    "an epoch change": Pods.next_epoch,
    "a node cordoned, one down": Pods.node_down,
    "no API server for 30 s": Pods.api_server_gone,
    "fewer nodes": Pods.fewer_nodes,
    "uninstall and install": Pods.uninstalled,
}


def add_arguments(parser):
    parser.add_argument("--image", required=True)
    parser.add_argument("--cpu", default="1")
    parser.add_argument("--api-server", help="a command with {action}, which is stop or start")


main(__doc__, ROWS, Pods, add_arguments)
