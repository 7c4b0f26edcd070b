#!/usr/bin/env python3
"""Grows and shrinks the instance on a real cluster of three nodes or more, each way several times, with jobs that must not
notice.

    KUBECONFIG=… scripts/cluster_elastic.py --manifest FILE --node-shell 'COMMAND {node}' [--power 'COMMAND {action} {node}']
        [--runs 5] [--rows WORD,…]

The arguments are those of cluster_faults.py. Use a cluster that can be damaged."""

import json, time

from cluster import Cluster, Wrong, kubectl, main, ours, until

PROTECTS = ["cluster-autoscaler.kubernetes.io/scale-down-disabled", "karpenter.sh/do-not-disrupt"]


class Elastic(Cluster):
    OWN = "a rank to free"

    def misses(self, row):
        return "--power" if row in POWER_CUTS and not self.power_command else None

    def up(self):
        kubectl("apply", "-f", self.manifest)
        until("the instance", lambda: bool(self.instance()))
        self.set(size=None)
        self.all_online()

    def scale(self, size):
        ours("scale", "fluxinstance/flux", f"--replicas={size}")

    def ups(self):
        """Ranks that Flux has up and not drained."""
        found = self.flux("resource", "list", "-s", "free,allocated", "-no", "{nnodes}").split()
        return sum(map(int, found))

    def are_up(self, size):
        """By Flux's word and by the status."""

        def look():
            ups, status = self.ups(), self.instance()["status"]
            return (ups, status["size"], status["online"]) == (size, size, size) or (ups, status)

        until(f"{size} up", look)

    def stay(self, before):
        """Brokers that were there at both times are the same."""
        gone = [node for node, broker in self.brokers().items() if not broker or not before[node]]
        self.same_brokers(before, but=gone)

    def drained(self):
        return self.flux("resource", "drain", "-no", "{nodelist} {reason}")

    def ends_well(self, job):
        self.flux("job", "wait-event", "-t", "60", job, "clean")
        events = self.flux("job", "eventlog", job)
        if "exception" in events or events.count(" start\n") > 1 or "status=0" not in events:
            raise Wrong(f"the job's events: {events}")

    def followers(self):
        return [node for node in self.nodes if node != self.instance()["status"]["lead"]]

    def about(self, node):
        return json.loads(kubectl("get", "node", node, "-o", "json"))

    def take_away(self, nodes):
        for node in nodes:
            self.power("kill", node)
            kubectl("delete", "node", node)

    def come_back(self, nodes):
        for node in nodes:
            self.power("start", node)

    # The rows. Some tell how long it took from a rank to free.

    def resize(self):
        most = len(self.nodes)
        for size in [2, most, most - 1, most, 1, most]:
            before = self.brokers()
            self.scale(size)
            self.are_up(size)
            self.stay(before)
        maximum = self.instance()["status"]["maxSize"]
        try:
            self.scale(0)
        except Wrong as refused:
            if "delete the FluxInstance" not in str(refused):
                raise
        else:
            raise Wrong("size 0 was taken")
        # The default is the planner's to judge, one of the spec's the API server's.
        before = self.brokers()
        self.scale(maximum + 1)

        def is_denied():
            conditions = self.instance()["status"]["conditions"]
            denied = next((found for found in conditions if found["type"] == "ScaleDenied"), {})
            said = denied.get("message", "")
            return denied.get("status") == "True" and str(maximum + 1) in said and str(maximum) in said or conditions

        until("ScaleDenied", is_denied)
        if (now := self.brokers()) != before or self.instance()["spec"]["size"] != maximum + 1:
            raise Wrong(f"{before} before, {now} now; spec {self.instance()['spec']}")

    def grow(self):
        most = len(self.nodes)
        self.scale(most - 1)
        self.are_up(most - 1)
        job = self.job_on(most - 1)
        self.scale(most)
        begin = time.monotonic()
        until("the last one up", lambda: self.ups() == most or self.ups())
        seconds = time.monotonic() - begin
        self.end(job)
        return seconds

    def shrink(self):
        most = len(self.nodes)
        job = self.flux("submit", "-N", str(most), "-n", str(most), "sleep", "8")
        self.flux("job", "wait-event", "-t", "20", "-p", "exec", job, "shell.start")
        before = self.brokers()
        self.scale(most - 1)
        until("the last one drained", lambda: "flux-distribute:" in self.drained() or self.drained())
        self.same_brokers(before)
        self.ends_well(job)
        self.are_up(most - 1)
        self.stay(before)

    def cordon(self):
        node = self.followers()[0]
        job = self.job_on(len(self.nodes))
        before = self.brokers()
        try:
            kubectl("cordon", node)
            until("it drained", lambda: "flux-distribute:" in self.drained() or self.drained())
        finally:
            kubectl("uncordon", node)
        until("no drained node", lambda: not self.drained() or self.drained())
        self.same_brokers(before)
        self.end(job)

    def wait_for_one_more(self):
        most = len(self.nodes)
        self.scale(most - 1)
        self.are_up(most - 1)
        job = self.flux("submit", "-N", str(most), "-n", str(most), "hostname")
        pending = lambda: self.instance()["status"].get("pendingNodes", 0)
        until("a node that is waited for", lambda: pending() == 1 or pending())
        self.scale(most)
        self.ends_well(job)
        until("no pending nodes", lambda: pending() == 0 or pending())
        hosts = self.flux("job", "attach", job).split()
        if len(set(hosts)) != most:
            raise Wrong(f"it ran on {hosts}")

    def protect(self):
        protected = lambda: [
            node["metadata"]["name"]
            for node in json.loads(kubectl("get", "nodes", "-o", "json"))["items"]
            if all(key in node["metadata"].get("annotations", {}) for key in PROTECTS)
        ]
        lead = self.instance()["status"]["lead"]
        until("only the lead protected", lambda: protected() == [lead] or protected())
        job = self.job_on(len(self.nodes))
        until("all protected", lambda: protected() == self.nodes or protected())
        self.end(job)
        until("only the lead protected", lambda: protected() == [lead] or protected(), limit=180)

    def register_again(self):
        """A Node that was deleted while its machine was off: the same boot keeps the rank, another one may be another machine."""
        node = self.followers()[0]
        about = lambda: self.about(node)
        spec = lambda: json.loads(ours("get", "fluxnode", node, "-o", "json"))["spec"]
        before, was, rank = self.brokers(), about(), spec()["rank"]
        self.take_away([node])
        self.come_back([node])
        until("the Node", lambda: about()["metadata"]["uid"] != was["metadata"]["uid"])
        is_same = about()["status"]["nodeInfo"]["bootID"] == was["status"]["nodeInfo"]["bootID"]
        uid = about()["metadata"]["uid"]
        until("its rank", lambda: (spec().get("nodeUID") == uid and (spec().get("rank") == rank) == is_same) or spec())
        self.all_online()
        until("all up", lambda: self.ups() == len(self.nodes) or self.ups())
        if self.brokers()[node] == before[node]:
            raise Wrong(f"its broker is still the one of before: {before[node]}")
        self.same_brokers(before, but=[node])

    def come_and_go(self):
        """As many jobs of one core as there are cores; four nodes join; of two that have jobs and two that have none, all
        four are drained and then taken away."""
        self.set(ranks={"retain": "5s"})
        others = self.followers()[-4:]
        stay = len(self.nodes) - len(others)
        self.take_away(others)
        self.are_up(stay)
        cores = int(self.flux("resource", "list", "-s", "free", "-no", "{ncores}"))
        script = f"until test -e {END}; do sleep 1; done"
        jobs = self.flux("submit", f"--cc=1-{cores}", "-N1", "-n1", "sh", "-c", script).split()
        running = lambda: len(self.flux("jobs", "-f", "running", "-no", "{id}").split())
        until("all jobs", lambda: running() == len(jobs) or running())
        before = self.brokers()
        try:
            self.come_back(others)
            self.are_up(len(self.nodes))
            with_others = self.brokers()
            self.stay(before)
            busy = [node for node in self.followers() if node not in others][-2:]
            leave = busy + others[-2:]
            for node in leave:
                kubectl("cordon", node)
            drained = lambda: self.flux("resource", "status", "-s", "draining,drained", "-no", "{nnodes}").split()
            until("four drained", lambda: sum(map(int, drained())) == 4 or drained())
            if running() != len(jobs):
                raise Wrong(f"{running()} of {len(jobs)} jobs run")
            self.stay(with_others)
            for node in busy:
                self.on(node, f"touch {END}")
            until("two without jobs", lambda: running() < len(jobs) and not self.flux("resource", "status", "-s", "draining", "-no", "{ranks}") or running())
            self.take_away(leave)
            self.are_up(len(self.nodes) - 4)
            for node in self.nodes:
                if node not in leave:
                    self.on(node, f"touch {END}")
            for job in jobs:
                self.ends_well(job)
            self.stay(with_others)
        finally:
            self.come_back(node for node in self.nodes if not self.is_on(node))
            for node in self.nodes:
                until(f"{node}'s Node", lambda: bool(self.about(node)))
                kubectl("uncordon", node)
                self.on(node, f"rm -f {END}")
            self.set(ranks=None)

    def is_on(self, node):
        try:
            return self.on(node, "echo on").strip() == "on"
        except Wrong:
            return False

    def kinds(self):
        """Labels that are properties, a core and the lead that no job gets, and back."""
        lead, (first, second, *_) = self.instance()["status"]["lead"], self.followers()
        before = self.brokers()
        asks = lambda *words: self.flux("run", *words, "hostname").split()
        free = lambda: int(self.flux("resource", "list", "-s", "free", "-no", "{ncores}") or 0)
        all_cores = free()
        each = all_cores // len(self.nodes)
        try:
            kubectl("label", "node", first, "example.org/pool=big")
            kubectl("label", "node", second, "example.org/pool=small")
            self.set(resources={"properties": ["example.org/pool"], "exclude": {"lead": True, "cores": "0"}})
            expected = (len(self.nodes) - 1) * (each - 1)
            until("what is left", lambda: free() == expected or free())
            for node, pool in [(first, "big"), (second, "small")]:
                until(f"a job on {pool}", lambda: asks("-N1", f"--requires=example.org/pool={pool}") == [node])
            if lead in (hosts := asks("-N", str(len(self.nodes) - 1))):
                raise Wrong(f"a job ran on {hosts}, and the lead {lead} is excluded")
        finally:
            self.set(resources=None)
            kubectl("label", "node", first, second, "example.org/pool-")
        until("all cores again", lambda: free() == all_cores or free())
        self.same_brokers(before)

    def spares(self):
        """The next epoch has 1,024 ranks, and the one after that as few as there are nodes."""
        for maximum in [1024, max(4, len(self.nodes))]:
            epoch, begin = self.instance()["status"]["epoch"], time.monotonic()
            self.set(maxSize=maximum)

            def is_begun():
                status = self.instance()["status"]
                return status["epoch"] > epoch and status["maxSize"] == maximum or status

            until(f"the next epoch, of {maximum} ranks", is_begun)
            self.are_up(len(self.nodes))
            seconds, lead = time.monotonic() - begin, self.instance()["status"]["lead"]
            memory = self.on(lead, f"grep VmRSS /proc/{self.brokers()[lead].split()[1]}/status").split()[1]
            print(f"maxSize {maximum}: up after {seconds:.1f} s, the lead's broker has {int(memory) >> 10} MiB", flush=True)
        self.set(maxSize=None)


# Ends the jobs of a node.
END = "/tmp/end-of-the-jobs"
ROWS = {
    "fewer, more, one, too many": Elastic.resize,
    "one more beside a job": Elastic.grow,
    "one less under a job": Elastic.shrink,
    "cordon and uncordon under a job": Elastic.cordon,
    "a job that waits for one more node": Elastic.wait_for_one_more,
    "nodes with a job are protected": Elastic.protect,
    "a Node deleted and registered again": Elastic.register_again,
    "four join, four are drained and go": Elastic.come_and_go,
    "labels and exclusions": Elastic.kinds,
    "1,024 ranks": Elastic.spares,
}
POWER_CUTS = [Elastic.register_again, Elastic.come_and_go]

main(__doc__, ROWS, Elastic)
