#!/usr/bin/env python3
"""What a real cluster's administrator does to us, each thing several times: teardowns in any order must leave clean hosts
and nothing in Terminating; rollouts and objects that vanish must leave the brokers and a job over all nodes alone.

    KUBECONFIG=… scripts/cluster_faults.py --manifest FILE --node-shell 'COMMAND {node}' [--power 'COMMAND {action} {node}']
        [--other-image IMAGE] [--runs 5] [--rows WORD,…]

FILE is an installer with an image that the nodes have and packages that they can reach; COMMAND runs `sh -c SCRIPT` on a
node's host as root, such as 'docker exec {node}' for kind; --power cuts a node's power (kill) and boots it (start), such as
'docker {action} {node}'. --other-image names another build for the rows that have two. Use a cluster that can be damaged."""

import concurrent.futures, json, re, time

from cluster import NAMESPACE, Cluster, Wrong, kubectl, main, ours, until

CRDS = ["fluxinstances.distribute.flux-framework.org", "fluxnodes.distribute.flux-framework.org"]
# What changes on a host without us.
OTHERS = r"^/(proc|sys|dev|tmp|var/log|var/lib/(containerd|kubelet|cni)|run/(containerd|containers|kubelet|netns|runc|cni)|etc/cni|root)(/|$)"
LOOK = r"""find / -xdev 2>/dev/null | grep -Ev '{others}' | sort
find /run /opt -mindepth 1 2>/dev/null | grep -Ev '{others}' | sort
find /sys/fs/cgroup -name 'flux*'
grep -h flux /proc/mounts
for file in /proc/sys/fs/inotify/max_user_instances /proc/sys/fs/inotify/max_user_watches; do echo $file $(cat $file); done
for process in /proc/[0-9]*; do read -r name < $process/comm; case $name in flux-distribute) ;; flux*) echo process $name;; esac; done 2>/dev/null
true""".replace("{others}", OTHERS)


class Faults(Cluster):
    OWN = "hosts clean"

    def __init__(self, arguments):
        super().__init__(arguments)
        self.text = open(arguments.manifest).read()
        self.other_image = arguments.other_image
        self.before = {node: self.look(node) for node in self.nodes}

    def misses(self, fault):
        if fault in TWO_BUILDS and not self.other_image:
            return "--other-image"
        return "--power" if fault in POWER_CUTS and not self.power_command else None

    def look(self, node):
        return set(self.on(node, LOOK).splitlines())

    # What must hold after a fault.

    def is_clean(self):
        return self.are_clean(self.nodes)

    def are_clean(self, nodes):
        left = {node: sorted(self.look(node) - self.before[node]) for node in nodes}
        return not any(left.values()) or left

    def cleans(self, *words, **options):
        """Seconds until the hosts are clean: the namespace may be there for longer, which is Kubernetes' own matter (it
        looks again after half the pods' grace)."""
        begin = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor() as other:
            deleted = other.submit(kubectl, "delete", *words, **options)
            until("clean hosts", self.is_clean)
            clean = time.monotonic() - begin
            deleted.result()
        return clean

    def kept(self, fault):
        """The brokers are the same processes, and the job over all of them goes on."""
        job = self.job_on(len(self.nodes))
        brokers = self.brokers()
        fault()
        self.all_online()
        self.same_brokers(brokers)
        self.end(job)

    # The faults: teardowns. Each tells how long the hosts took.

    def delete_in_file_order(self):
        return self.cleans("-f", self.manifest)

    def delete_in_reversed_order(self):
        parts = [part for part in re.split(r"^---$", self.text, flags=re.M) if re.search(r"^kind:", part, flags=re.M)]
        return self.cleans("-f", "-", stdin="---".join(reversed(parts)))

    def delete_the_namespace_alone(self):
        return self.cleans("namespace", NAMESPACE)

    def delete_the_clusterrolebinding_first(self):
        kubectl("delete", "clusterrolebinding", NAMESPACE)
        time.sleep(1)
        return self.cleans("-f", self.manifest, "--ignore-not-found")

    def delete_the_crds_alone(self):
        clean = self.cleans("crd", *CRDS)
        # An instance that was deleted does not come back when the file is applied again.
        kubectl("delete", "-f", self.manifest, "--ignore-not-found")
        return clean

    # The faults: what must be kept.

    def restart_by_rollout(self):
        self.kept(lambda: ours("rollout", "restart", "daemonset/install-flux"))

    def delete_and_apply_the_daemonset(self):
        def fault():
            ours("delete", "daemonset", "install-flux")
            until("no agent", lambda: not ours("get", "pods", "-o", "name").strip())
            time.sleep(5)
            kubectl("apply", "-f", self.manifest)

        self.kept(fault)

    def change_the_pods_labels(self):
        labels = {"spec": {"template": {"metadata": {"labels": {"changed": str(time.time_ns())}}}}}
        self.kept(lambda: ours("patch", "daemonset", "install-flux", "-p", json.dumps(labels)))

    def roll_back_in_the_middle(self):
        def fault():
            ours("set", "image", "daemonset/install-flux", f"agent={self.other_image}")
            until("a pod of the other build", lambda: self.other_image in self.images())
            ours("rollout", "undo", "daemonset/install-flux")

        self.kept(fault)

    def two_builds_side_by_side(self):
        """The other one is the planner's, or it is not: both, as chance has it."""
        strategy = json.loads(ours("get", "daemonset", "install-flux", "-o", "json"))["spec"]["updateStrategy"]

        def update(strategy):
            patch = [{"op": "replace", "path": "/spec/updateStrategy", "value": strategy}]
            ours("patch", "daemonset", "install-flux", "--type=json", "-p", json.dumps(patch))

        def fault():
            update({"type": "OnDelete"})
            ours("set", "image", "daemonset/install-flux", f"agent={self.other_image}")
            ours("delete", ours("get", "pods", "-o", "name").split()[0])
            until("a pod of the other build", lambda: self.other_image in self.images())
            until("all nodes Online", lambda: self.are_online(self.nodes))
            time.sleep(10)
            ours("rollout", "undo", "daemonset/install-flux")
            update(strategy)

        self.kept(fault)

    def images(self):
        pods = json.loads(ours("get", "pods", "-o", "json"))["items"]
        return [pod["spec"]["containers"][0]["image"] for pod in pods]

    def force_delete_all_pods(self):
        self.kept(lambda: ours("delete", "pods", "--all", "--force", "--grace-period=0"))

    # The faults: what heals, and costs a job that ran there.

    def heals(self, fault):
        """Until a job runs on all nodes again."""
        size = str(len(self.nodes))
        fault()
        until("all nodes Online", lambda: self.are_online(self.nodes))
        until("a job on all nodes", lambda: len(set(self.flux("run", "-N", size, "hostname").split())) == len(self.nodes))

    def follower(self):
        lead = self.instance()["status"]["lead"]
        return next(node for node in self.nodes if node != lead)

    def kill_a_follower_s_broker(self):
        node = self.follower()
        before = self.brokers()
        pid = before[node].split()[1]

        def fault():
            self.on(node, f"kill -9 {pid}")
            until("another broker", lambda: pid not in self.brokers()[node].split() or self.brokers())

        self.heals(fault)
        self.same_brokers(before, but=[node])

    def cut_power(self, node):
        def fault():
            self.power("kill", node)
            time.sleep(5)
            self.power("start", node)
            until("its broker", lambda: bool(self.brokers()[node]))

        self.heals(fault)

    def cut_a_follower_s_power(self):
        self.cut_power(self.follower())

    def cut_the_lead_s_power(self):
        self.cut_power(self.instance()["status"]["lead"])

    def delete_the_instance_with_a_node_down(self):
        """It cleans itself when it returns; the others do at once."""
        node = self.follower()
        self.power("kill", node)
        ours("delete", "fluxinstance", "flux")
        others = [other for other in self.nodes if other != node]
        until("clean hosts but for one", lambda: self.are_clean(others))
        time.sleep(3)
        begin = time.monotonic()
        self.power("start", node)
        until("clean hosts", self.is_clean)
        clean = time.monotonic() - begin
        # An instance that was deleted does not come back when the file is applied again.
        kubectl("delete", "-f", self.manifest, "--ignore-not-found")
        return clean


ROWS = {
    "delete -f, in file order": Faults.delete_in_file_order,
    "delete -f, reversed": Faults.delete_in_reversed_order,
    "delete the namespace alone": Faults.delete_the_namespace_alone,
    "ClusterRoleBinding first": Faults.delete_the_clusterrolebinding_first,
    "delete the CRDs alone": Faults.delete_the_crds_alone,
    "rollout restart": Faults.restart_by_rollout,
    "DaemonSet deleted and applied": Faults.delete_and_apply_the_daemonset,
    "label change of the pods": Faults.change_the_pods_labels,
    "rollback in the middle of an update": Faults.roll_back_in_the_middle,
    "two builds side by side": Faults.two_builds_side_by_side,
    "all pods force-deleted": Faults.force_delete_all_pods,
    "kill -9 of a follower's broker": Faults.kill_a_follower_s_broker,
    "power cut and boot of a follower": Faults.cut_a_follower_s_power,
    "power cut and boot of the lead": Faults.cut_the_lead_s_power,
    "instance deleted with a node down": Faults.delete_the_instance_with_a_node_down,
}
TWO_BUILDS = [Faults.roll_back_in_the_middle, Faults.two_builds_side_by_side]
POWER_CUTS = [Faults.cut_a_follower_s_power, Faults.cut_the_lead_s_power, Faults.delete_the_instance_with_a_node_down]

main(__doc__, ROWS, Faults, lambda parser: parser.add_argument("--other-image"))
