#!/usr/bin/env python3
"""Pods through Flux on a real cluster of four nodes or more: kinds of controllers, gangs, refusals, deletions, restarts, an epoch
change, a smaller instance and an uninstall, beside pods that must not notice.

    KUBECONFIG=… scripts/cluster_pods.py --manifest FILE --node-shell 'COMMAND {node}' --image IMAGE [--cpu 1]
        [--power 'COMMAND {action} {node}'] [--api-server 'COMMAND {action}'] [--runs 5] [--rows WORD,…]

IMAGE has a program that writes a line, sleeps for as many seconds as its first argument says, and exits with its second. A node must
have room for one pod that requests as much CPU, and for no second one. ConfigMap flux-default of the manifest switches spec.pods on. The action of
--api-server is stop or start. The other arguments are those of cluster_faults.py. Use a cluster that can be damaged; namespace default
is emptied."""

import datetime, json, random, statistics, time
from concurrent.futures import ThreadPoolExecutor

from cluster import Wrong, kubectl, main, ours, until, until_is
from pod_cluster import AGENT, BROKER, FOREVER, GROUP, KUBELET, PodCluster

# Moments of a deletion after which the container may still run when the pod is gone.
FORCED = ("terminating", "forced")


class Pods(PodCluster):
    def misses(self, row):
        if row in (Pods.lead_without_power, Pods.node_down) and not self.power_command:
            return "--power"
        return "--api-server" if row == Pods.api_server_gone and not self.api_command else None

    def kinds(self):
        """Pods of six kinds: each has cores of its own, on the node where Flux has given them out."""
        self.pod("bare")
        self.job("work", 1, False)
        self.controller("Deployment", "deployment", 1)
        self.have_own_cores(3)
        kubectl("delete", "pod", "bare")
        self.controller("StatefulSet", "stateful", 1)
        self.controller("ReplicaSet", "replicas", 1)
        self.until_running(4)
        kubectl("delete", "job", "work", "--cascade=foreground")
        self.have_own_cores(3)
        kubectl("delete", "deployment,replicaset,statefulset", "--all", "--cascade=foreground")
        self.job("gang", 3, True)
        self.have_own_cores(3)

    def have_own_cores(self, count):
        until_is(count, "so many pods Running", lambda: len(self.running()))
        taken = {}
        for name, pod in self.running().items():
            record = json.loads(pod["metadata"]["annotations"][f"{GROUP}/job"])
            r = json.loads(self.flux("job", "info", record["id"], "R"))["execution"]
            node = pod["spec"]["nodeName"]
            if node not in self.flux("hostlist", "-e", *r["nodelist"]).split():
                raise Wrong(f"{name} is on {node}, R is {r}")
            if taken.setdefault((node, record["cores"]), name) != name:
                raise Wrong(f"{name} has {record}, taken are {taken}")

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

    def disturb(self, do, cores_are_given_again=True):
        """Gangs run and gangs wait; then `do`. All is as before, but for the pods on the node that it names."""
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
        self.until_next_gang()
        self.run_on({name: pod for name, pod in before.items() if not name.startswith("run0-")})
        until("no job without its pods", self.has_no_orphans, 30)

    def until_next_gang(self):
        until("the next gang bound", lambda: {"wait0-0", "wait0-1"} <= self.running().keys() or list(self.running()))

    def has_no_orphans(self):
        jobs = set(self.flux("jobs", "-n", "--filter=running,pending", "-o", "{name}").split())
        names = {f"default/{name}" for name in self.pods()}
        orphans = {job for job in jobs if not any(name == job or name.startswith(f"{job}-") for name in names)}
        return not orphans or orphans

    def agent_killed(self):
        return self.disturb(lambda lead: self.signal(lead, "KILL", AGENT), False)

    def broker_terminated(self):
        return self.disturb(lambda lead: self.signal(lead, "TERM", BROKER))

    def broker_killed(self):
        return self.disturb(lambda lead: self.signal(lead, "KILL", BROKER))

    def next_epoch(self):
        def do(_):
            epoch = self.instance()["status"]["epoch"]
            ours("annotate", "fluxinstance", "flux", "--overwrite", f"{GROUP}/restart={time.time()}")
            until("the next epoch", lambda: self.instance()["status"]["epoch"] > epoch)

        return self.disturb(do)

    def lead_without_power(self):
        def do(lead):
            self.power("kill", lead)
            time.sleep(5)
            self.power("start", lead)
            return lead

        return self.disturb(do)

    def api_server_gone(self):
        def do(_):
            self.api_server("stop")
            time.sleep(30)
            self.api_server("start")

        return self.disturb(do, False)

    def node_down(self):
        """The lead's broker restarts while one gang has a node that is cordoned and a node that is down: the recovery waits for neither."""
        self.pairs()
        before, lead = self.running(), self.instance()["status"]["lead"]
        on = {number: [before[f"run{number}-{member}"]["spec"]["nodeName"] for member in range(2)] for number in (0, 1)}
        free, (cordoned, down) = (0, on[1]) if lead not in on[1] else (1, on[0])
        kubectl("cordon", cordoned)
        self.power("kill", down)
        try:
            self.signal(lead, "KILL", BROKER)
            begin = time.monotonic()
            kubectl("delete", "pod", f"run{free}-0", f"run{free}-1", "--wait=false")
            self.until_next_gang()
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
        """A node joins while gangs end; afterwards each node still has its core to give."""
        most = len(self.nodes)
        self.set(most - 1)
        until_is(most - 1, "that size", self.size)
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
            starts = [datetime.datetime.fromisoformat(line).timestamp() for line in lines]
            skews.append(max(starts) - min(starts))
        least = sum(sizes) * seconds / most
        print(f"measured: 50 gangs of {sum(sizes)} pods, skew of a gang's start: median {statistics.median(skews):.2f} s, "
              f"{took:.0f} s in all, kubectl's creation of the pods among them: {took / least:.1f} times what the pods' own "
              f"{seconds} s take on {most} nodes", flush=True)

    def refused(self):
        """kubelet refuses a member of a Job three times: the others stay, and the Job completes."""
        most, label = len(self.nodes), f"test.{GROUP}/here"
        target = next(node for node in self.nodes if node != self.instance()["status"]["lead"])
        kubectl("label", "nodes", "--all", "--overwrite", f"{label}=yes")
        self.signal(target, "STOP", KUBELET)
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
                self.signal(target, "CONT", KUBELET)
                if turn < 3:
                    until("a refusal", lambda name=name: self.pods()[name]["status"]["phase"] == "Failed")
                    refused.add(uid)
                    self.signal(target, "STOP", KUBELET)
                    kubectl("label", "node", target, f"{label}=yes")
            self.run_on(before)
            until("the Job's end", lambda: self.the_job("refused")["status"].get("succeeded") == most, 300)
        finally:
            self.signal(target, "CONT", KUBELET)
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
            forced = ["--grace-period=0", "--force"] if moment in FORCED else []
            kubectl("delete", "pod", *names, "--ignore-not-found", *forced)
            return name, moment, time.time()

        with ThreadPoolExecutor(8) as pool:
            deleted = [pool.submit(one, number) for number in range(40)]
            while not all(each.done() for each in deleted):
                self.runs_on_its_cores()
            deleted = [each.result() for each in deleted]
        until_is(0, "all cores free", self.held)
        ended = {}
        for line in self.flux("jobs", "-a", "-n", "--count=0", "-o", "{name} {t_inactive}").splitlines():
            name, at = line.rsplit(None, 1)
            ended[name] = max(float(at), ended.get(name, 0))
        took = [(ended.get(f"default/{name}", gone) - gone, moment, name) for name, moment, gone in deleted]
        late = [each for each in took if each[0] > (12 if each[1] in FORCED else 2)]
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
        """spec.size falls: a member stays while a gang runs on it; a single pod runs on after its member has left."""
        most = len(self.nodes)
        self.controller("Deployment", "service", most - 2)
        self.gang("gang", 2)
        self.until_running(most)
        before = self.running()
        on_nodes = {before[f"gang-{member}"]["spec"]["nodeName"] for member in range(2)}
        ranks = json.loads(ours("get", "fluxnodes", "-o", "json"))["items"]
        ranks = {node["metadata"]["name"]: node["spec"]["rank"] for node in ranks}
        size = max(1, max(ranks[node] for node in on_nodes))

        try:
            self.set(size)
            time.sleep(5)
            if self.size() == size:
                raise Wrong("a member has left under a gang")
            self.run_on(before)
            kubectl("delete", "pod", "gang-0", "gang-1")
            before = {name: pod for name, pod in before.items() if not name.startswith("gang")}
            until_is(size, "that size", self.size)
            self.set(1)
            until_is(1, "that size", self.size)
            self.run_on(before)
        finally:
            self.set(None)

    def size(self):
        return self.instance()["status"]["size"]

    def set(self, size):
        ours("patch", "fluxinstance", "flux", "--type=merge", "-p", json.dumps({"spec": {"size": size}}))

    def uninstalled(self):
        """Beside a service that never ends; and what is installed next holds its cores again."""
        self.controller("Deployment", "service", len(self.nodes))
        self.until_running(len(self.nodes))
        before, again = self.running(), self.instance()
        ours("delete", "fluxinstance", "flux")
        until_is({}, "hosts clean", self.phases)
        self.run_on(before)
        self.apply("FluxInstance", f"{GROUP}/v1alpha1", "flux", again["spec"], {"namespace": again["metadata"]["namespace"]})
        self.all_online()
        begin = time.monotonic()
        until_is(len(self.nodes), "all cores held", self.held)
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
