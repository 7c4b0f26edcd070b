#!/usr/bin/env python3
"""Pods through Flux on a real cluster of four nodes or more: kinds of controllers, gangs, refusals, deletions, restarts, an epoch
change, a smaller instance and an uninstall, beside pods that must not notice.

    KUBECONFIG=… scripts/cluster_pods.py --manifest FILE --node-shell 'COMMAND {node}' --image IMAGE [--cpu 1] [--pods-per-node 1]
        [--power 'COMMAND {action} {node}'] [--api-server 'COMMAND {action}'] [--runs 5] [--rows WORD,…]

IMAGE has a program that writes a line, sleeps for as many seconds as its first argument says, and exits with its second. CPU
is one core, that is 2 where a core has two threads, and a node must have room for exactly as many pods that request it; some rows are for one
on each node. ConfigMap flux-default of the manifest switches spec.pods on. The action of
--api-server is stop or start. The other arguments are those of cluster_faults.py. Use a cluster that can be damaged; namespace default
is emptied."""

import datetime, json, random, statistics, time
from concurrent.futures import ThreadPoolExecutor

from cluster import Wrong, kubectl, main, ours, until, until_is
from pod_cluster import AGENT, BROKER, FOREVER, GROUP, KUBELET, PodCluster

# Moments of a deletion after which the container may still run when the pod is gone.
FORCED = ("terminating", "forced")
GPU = "example.com/gpu"


class Pods(PodCluster):
    def misses(self, row):
        if row in ONE_ON_EACH_NODE and self.per_node > 1:
            return "one pod on each node"
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

    def full(self):
        """A hundred pods of six kinds in turns, on nodes without room for one more: what does not fit waits and says why, and
        kubelet refuses none."""
        each, checked, reasons, run = self.room // 6, set(), set(), 0
        while len(checked) < 100:
            run += 1
            self.create(*[self.a_pod(f"bare{run}-{number}") for number in range(self.room - 5 * each)])
            self.job(f"work{run}", each, False)
            self.job(f"gang{run}", each, True)
            for kind in ("Deployment", "ReplicaSet", "StatefulSet"):
                self.controller(kind, f"{kind.lower()}{run}", each)
            self.have_own_cores(self.room)
            checked |= {pod["metadata"]["uid"] for pod in self.running().values()}
            self.job(f"later{run}", each, True)
            until("all that wait say why", lambda: self.tell_why(each, reasons))
            kubectl("delete", "deployment", f"deployment{run}", "--cascade=foreground")
            until("the gang runs that has waited", lambda: self.count(f"later{run}") >= each or list(self.running()))
            self.pod(f"single{run}")
            until("the pod that waits says why", lambda: self.tell_why(1, reasons))
            self.have_own_cores(self.room)
            checked |= {pod["metadata"]["uid"] for pod in self.running().values()}
            self.none_failed()
            kubectl("delete", "replicaset,statefulset,jobs,pods", "--all", "--cascade=foreground")
            until_is({}, "no pods", self.pods)
        print(f"measured: {len(checked)} pods on the cores of their R; those that wait say {sorted(reasons)}", flush=True)

    def count(self, prefix):
        return len([name for name in self.running() if name.startswith(prefix)])

    def tell_why(self, count, reasons):
        """True if so many pods wait, each with a reason."""
        waiting = [pod for pod in self.pods().values() if pod["status"]["phase"] == "Pending" and "nodeName" not in pod["spec"]]
        found = [condition for pod in waiting for condition in pod["status"].get("conditions", [])
                 if condition["type"] == "PodScheduled" and condition["status"] == "False" and condition.get("message")]
        reasons |= {f"{condition['reason']}: {condition['message']}" for condition in found}
        return len(waiting) == len(found) == count or (len(waiting), found)

    def none_failed(self):
        if failed := {name: pod["status"].get("reason") for name, pod in self.pods().items() if pod["status"]["phase"] == "Failed"}:
            raise Wrong(f"failed: {failed}")

    def gpus(self):
        """Two nodes have a GPU each, as a device plugin declares it. What requests one runs there alone, a gang of two on both; a pod that
        finds none free waits, says so, and gets the first that is."""
        two = [node for node in self.nodes if node != self.instance()["status"]["lead"]][:2]
        self.declare_gpu("add", two)
        try:
            self.create(*[self.with_gpu(pod) for pod in self.members("pair", 2)])
            self.have_own_cores(2)
            if self.nodes_of("pair") != sorted(two):
                raise Wrong(f"{self.nodes_of('pair')} have the gang, {two} the GPUs")
            self.create(self.with_gpu(self.a_pod("third")))
            if self.per_node > 1:
                until("the pod that waits says why", lambda: self.tells("third", "did not fit"))
            self.have_own_cores(2)
            kubectl("delete", "pod", "pair-0", "pair-1")
            self.have_own_cores(1)
            if not set(self.nodes_of("third")) <= set(two):
                raise Wrong(f"{self.nodes_of('third')} has no GPU")
            self.none_failed()
        finally:
            self.declare_gpu("remove", two)

    @staticmethod
    def with_gpu(pod):
        pod["spec"]["containers"][0]["resources"]["limits"] = {GPU: "1"}
        return pod

    @staticmethod
    def declare_gpu(action, nodes):
        paths = [f"/status/{part}/{GPU.replace('/', '~1')}" for part in ("capacity", "allocatable")]
        patch = json.dumps([{"op": action, "path": path, "value": "1"} for path in paths])
        for node in nodes:
            kubectl("patch", "node", node, "--subresource=status", "--type=json", "-p", patch)

    def nodes_of(self, prefix):
        return sorted(pod["spec"]["nodeName"] for name, pod in self.running().items() if name.startswith(prefix))

    def tells(self, name, text):
        told = [condition.get("message", "") for condition in self.pods()[name]["status"].get("conditions", [])]
        return any(text in message for message in told) or told

    def priorities(self):
        """A hundred pods of five priorities wait in random order: they get cores in the order of their priorities."""
        values = {f"priority-{number}": 1000 * number for number in range(1, 6)}
        self.create(*[{"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": name}, "value": value}
                      for name, value in values.items()])
        self.create(*[self.a_pod(f"first{number}") for number in range(self.room)])
        self.until_running(self.room)
        turn = f"t{random.getrandbits(24):06x}"
        waiting = {f"{turn}-{number}": random.choice(list(values)) for number in range(100)}
        self.create(*[self.a_pod(name, "1", priorityClassName=priority) for name, priority in waiting.items()])
        begin, of = time.monotonic(), lambda name: values[waiting[name.removeprefix("default/")]]

        def is_in_order():
            queue = [of(name) for name in self.queue()]
            return len(queue) == 100 and queue == sorted(queue, reverse=True) or queue

        until("a hundred in the queue, in order", is_in_order)
        print(f"measured: in order {time.monotonic() - begin:.1f} s after they were made", flush=True)
        kubectl("delete", "pod", "--wait=false", *[f"first{number}" for number in range(self.room)])
        until_is(100, "all done", lambda: sum(pod["status"]["phase"] == "Succeeded" for pod in self.pods().values()))
        jobs = self.flux("jobs", "-a", "-n", "--filter=completed,running", "-c", "0", "-o", "{t_run} {name}").splitlines()
        began = sorted((float(time), name.removeprefix("default/")) for time, name in map(str.split, jobs) if turn in name)
        order = [of(name) for _, name in began]
        if len(order) != 100 or order != sorted(order, reverse=True):
            raise Wrong(f"the order of priorities was {order}")
        kubectl("delete", "pods", "--all")
        kubectl("delete", "priorityclass", *values)

    def pairs(self):
        """Gangs of two nodes on all cores, and as many that wait: a few a time, because creation times are whole seconds. Those that come
        later have names that come first, and no name comes twice: a lead that loses its last minute brings back jobs of the turn before."""
        gangs, self.turn = range(self.room // 2), f"t{random.getrandbits(24):06x}"
        self.create(*[member for number in gangs for member in self.apart(f"{self.turn}-run{number}")])
        if self.room % 2:
            self.pod("single")
        self.until_running(self.room)
        for first in gangs[::4]:
            names = [f"{self.turn}-wait{99 - first // 4}x{number}" for number in range(len(gangs[first : first + 4]))]
            self.create(*[member for name in names for member in self.apart(name)])
            time.sleep(3.2)
        until_is(len(gangs), "so many gangs queued", lambda: len(self.queue()))

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
            return are_held and are_new and self.batches(self.queue()) == self.batches(queue) or (jobs, self.queue())

        until("all as before", is_as_before)
        seconds = time.monotonic() - begin
        self.run_on(before)
        self.have_own_cores(len(self.running()), False)
        self.the_next_gang_runs(before, queue)
        return seconds

    def the_next_gang_runs(self, before, queue):
        """The first of those that wait, once two cores are free."""
        first = f"{self.turn}-run0-"
        kubectl("delete", "pod", f"{first}0", f"{first}1", "--wait=false")
        self.until_next_gang(queue)
        self.run_on({name: pod for name, pod in before.items() if not name.startswith(first)})
        until("no job without its pods", self.has_no_orphans, 30)
        self.have_own_cores(len(self.running()), False)

    @staticmethod
    def batches(queue):
        """Gangs that were created together may come into the queue at the same moment, and have no order then."""
        return [name.split("x")[0] for name in queue]

    def until_next_gang(self, queue):
        """One of those that were created first. The others still wait, in their order; another one may run where a lost node has left cores."""
        first = [name.removeprefix("default/") for name in queue if self.batches([name]) == self.batches(queue[:1])]
        until(f"one of {first} bound", lambda: self.is_any_bound(first))
        left = lambda: self.batches(name for name in self.queue() if name.startswith(f"default/{self.turn}-wait"))
        before = self.batches(queue)
        until("the others in their order", lambda: (now := left()) in (before[1:], before[2:]) or now)

    def is_any_bound(self, gangs):
        pods = self.running().keys()
        return any({f"{gang}-0", f"{gang}-1"} <= pods for gang in gangs) or list(pods)

    def has_no_orphans(self):
        jobs = set(self.flux("jobs", "-n", "--filter=running,pending", "-o", "{name}").split())
        names = {f"default/{name}" for name in self.pods()}
        orphans = {job for job in jobs if not any(name == job or name.startswith(f"{job}-") for name in names)}
        return not orphans or orphans

    def agent_killed(self):
        return self.disturb(lambda lead: self.signal(lead, "KILL", AGENT), False)

    def agent_deleted(self):
        def do(lead):
            pods = ours("get", "pods", "-l", "app=install-flux", "--field-selector", f"spec.nodeName={lead}", "-o", "name")
            ours("delete", pods.strip())

        return self.disturb(do, False)

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
        before, queue, lead = self.running(), self.queue(), self.instance()["status"]["lead"]
        on = [[before[f"{self.turn}-run{number}-{member}"]["spec"]["nodeName"] for member in range(2)] for number in range(self.room // 2)]
        cordoned, down = next(nodes for nodes in on if lead not in nodes)
        first = next(f"{self.turn}-run{number}-" for number, nodes in enumerate(on) if not {cordoned, down} & set(nodes))
        kubectl("cordon", cordoned)
        self.power("kill", down)
        try:
            self.signal(lead, "KILL", BROKER)
            begin = time.monotonic()
            kubectl("delete", "pod", f"{first}0", f"{first}1", "--wait=false")
            self.until_next_gang(queue)
            seconds = time.monotonic() - begin
        finally:
            self.power("start", down)
            kubectl("uncordon", cordoned)
        staying = {name: pod for name, pod in before.items() if not name.startswith(first)}
        self.run_on({name: pod for name, pod in staying.items() if pod["spec"]["nodeName"] != down})
        until("the cores of all that run held", lambda: self.held() == len(self.running()) or self.held())
        self.have_own_cores(len(self.running()), False)
        until("no job without its pods", self.has_no_orphans, 30)
        return seconds

    def join(self):
        """A node joins while gangs end; afterwards each node still has its core to give."""
        most = len(self.nodes)
        self.set(size=most - 1)
        until_is(most - 1, "that size", self.size)
        try:
            for number in range(3 * self.room):
                self.gang(f"short{number}", 2, str(random.randint(1, 3)))
                if number == self.room:
                    self.set(size=None)
        finally:
            self.set(size=None)
        until("all gangs done", lambda: self.are_done("short") or list(self.running()), 300)
        self.controller("Deployment", "service", self.room)
        self.have_own_cores(self.room)

    def are_done(self, prefix):
        phases = {pod["status"]["phase"] for name, pod in self.pods().items() if name.startswith(prefix)}
        if "Failed" in phases:
            raise Wrong("a pod has failed")
        return phases == {"Succeeded"}

    def began(self, name):
        """When a pod wrote its line."""
        words = []
        until(f"the line of {name}", lambda: words.extend(kubectl("logs", "--timestamps", name).split()) or bool(words))
        return datetime.datetime.fromisoformat(words[0]).timestamp()

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
            starts = [self.began(f"g{number}-{member}") for member in range(size)]
            skews.append(max(starts) - min(starts))
        least = sum(sizes) * seconds / most
        print(f"measured: 50 gangs of {sum(sizes)} pods, skew of a gang's start: median {statistics.median(skews):.2f} s, "
              f"{took:.0f} s in all, kubectl's creation of the pods among them: {took / least:.1f} times what the pods' own "
              f"{seconds} s take on {most} nodes", flush=True)

    def refused(self):
        """kubelet refuses a member of a Job three times: the others stay, and the Job completes."""
        most, label = min(8, self.room), f"test.{GROUP}/here"
        target = next(node for node in self.nodes if node != self.instance()["status"]["lead"])
        self.leave_room(most, target)
        kubectl("label", "nodes", "--all", "--overwrite", f"{label}=yes")
        self.signal(target, "STOP", KUBELET)
        try:
            begin = time.monotonic()
            self.job("refused", most, True, "120", nodeSelector={label: "yes"})
            self.until_running(self.room - 1)
            before, refused, cores = self.running(), set(), set()
            for turn in range(4):
                fresh = lambda: [pod for name, pod in self.pods().items() if name.startswith("refused")
                                 and pod["spec"].get("nodeName") == target and pod["metadata"]["uid"] not in refused]
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

    def leave_room(self, count, target):
        """For so many pods, one of them on that node, and the others spread over the other nodes."""
        others = [node for node in self.nodes if node != target]
        free = {target: 1} | {node: len(range(number, count - 1, len(others))) for number, node in enumerate(others)}
        for node in self.nodes:
            self.controller("Deployment", f"filler-{node}", self.per_node - free[node], nodeSelector={"kubernetes.io/hostname": node})
        self.until_running(self.room - count)

    def cancelled(self):
        """`flux cancel` ends the pods of that gang and of no other: its Job is suspended until somebody resumes it."""
        size = min(4, self.room // 2)
        self.job("cancelled", size, True)
        self.gang("bare", size)
        self.until_running(2 * size)
        self.create(*[self.a_pod(f"beside{number}") for number in range(self.room - 2 * size)])
        self.have_own_cores(self.room)
        before = {name: pod for name, pod in self.running().items() if name.startswith("beside")}
        begin = time.monotonic()
        self.cancel("cancelled", "bare")
        until_is(len(before), "so many pods left", lambda: len(self.pods()))
        seconds = time.monotonic() - begin
        job = self.the_job("cancelled")
        if not job["spec"].get("suspend") or job["status"].get("failed"):
            raise Wrong(f"{job['spec']}, {job['status']}")
        time.sleep(10)
        self.have_own_cores(len(before))
        self.run_on(before)
        kubectl("patch", "job", "cancelled", "--type=merge", "-p", json.dumps({"spec": {"suspend": False}}))
        self.have_own_cores(len(before) + size)
        self.run_on(before)
        return seconds

    def cancel(self, *names):
        for name in names:
            lines = self.flux("jobs", "-n", "--filter=running", "-o", "{name} {id}").splitlines()
            self.flux("cancel", next(line.split()[1] for line in lines if line.split()[0] == f"default/{name}"))

    def the_job(self, name):
        return json.loads(kubectl("get", "job", name, "-o", "json"))

    def deletions(self):
        """Two hundred pods and gangs deleted at random moments: a core is free 2 s after its pod is gone, 12 s if that was forced, and
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
            deleted = [pool.submit(one, number) for number in range(200)]
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
            self.set(size=size)
            time.sleep(5)
            if self.size() == size:
                raise Wrong("a member has left under a gang")
            self.run_on(before)
            kubectl("delete", "pod", "gang-0", "gang-1")
            before = {name: pod for name, pod in before.items() if not name.startswith("gang")}
            until_is(size, "that size", self.size)
            self.set(size=1)
            until_is(1, "that size", self.size)
            self.run_on(before)
        finally:
            self.set(size=None)

    def size(self):
        return self.instance()["status"]["size"]

    def uninstalled(self):
        """Beside a service that never ends; and what is installed next holds its cores again."""
        self.controller("Deployment", "service", self.room)
        self.until_running(self.room)
        before, again = self.running(), self.instance()
        ours("delete", "fluxinstance", "flux")
        until_is({}, "hosts clean", self.phases)
        self.run_on(before)
        self.apply("FluxInstance", f"{GROUP}/v1alpha1", "flux", again["spec"], {"namespace": again["metadata"]["namespace"]})
        self.all_online()
        begin = time.monotonic()
        until_is(self.room, "all cores held", self.held)
        self.run_on(before)
        return time.monotonic() - begin


ROWS = {
    "six kinds of pods": Pods.kinds,
    "a hundred pods on full nodes": Pods.full,
    "GPUs on two nodes": Pods.gpus,
    "gangs that deadlock": Pods.gangs,
    "a member refused": Pods.refused,
    "deletions": Pods.deletions,
    "a hundred of five priorities": Pods.priorities,
    "flux cancel": Pods.cancelled,
    "a join": Pods.join,
    "kill -9 of the lead's agent": Pods.agent_killed,
    "deletion of the lead's agent": Pods.agent_deleted,
    "SIGTERM to the lead's broker": Pods.broker_terminated,
    "kill -9 of the lead's broker": Pods.broker_killed,
    "power of the lead's node": Pods.lead_without_power,
    "an epoch change": Pods.next_epoch,
    "a node cordoned, one down": Pods.node_down,
    "no API server for 30 s": Pods.api_server_gone,
    "fewer nodes": Pods.fewer_nodes,
    "uninstall and install": Pods.uninstalled,
}
ONE_ON_EACH_NODE = (Pods.gangs, Pods.deletions, Pods.fewer_nodes)


def add_arguments(parser):
    parser.add_argument("--image", required=True)
    parser.add_argument("--cpu", default="1")
    parser.add_argument("--pods-per-node", type=int, default=1)
    parser.add_argument("--api-server", help="a command with {action}, which is stop or start")


main(__doc__, ROWS, Pods, add_arguments)
