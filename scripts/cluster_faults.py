#!/usr/bin/env python3
"""What a real cluster's administrator does to us, each thing several times: teardowns in any order must leave clean hosts
and nothing in Terminating; rollouts and objects that vanish must leave the brokers and a job over all nodes alone.

    KUBECONFIG=… scripts/cluster_faults.py --manifest FILE --node-shell 'COMMAND {node}' [--runs 5] [--rows WORD,…]

FILE is an installer with an image that the nodes have and packages that they can reach; COMMAND runs `sh -c SCRIPT` on a
node's host as root, such as 'docker exec {node}' for kind. --other-image names another build for the rows that have two.
The cluster must be one that nobody needs."""

import argparse, concurrent.futures, json, re, shlex, statistics, subprocess, sys, time

NAMESPACE = "flux-distribute"
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
BROKERS = r"""for process in /proc/[0-9]*; do read -r name < $process/comm; case $name in flux-broker*)
echo $name ${process#/proc/} $(sed 's/.*) //' $process/stat | cut -d ' ' -f 20);; esac; done 2>/dev/null; true"""


class Wrong(Exception):
    pass


def run(*words, check=True, stdin=None, limit=300):
    try:
        done = subprocess.run(words, input=stdin, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired as error:
        raise Wrong(f"{shlex.join(words)} hangs") from error
    if check and done.returncode:
        raise Wrong(f"{shlex.join(words)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def kubectl(*words, **options):
    return run("kubectl", *words, **options)


def ours(*words, **options):
    return kubectl("-n", NAMESPACE, *words, **options)


def until(what, look, limit=120):
    begin = time.monotonic()
    end, told = begin + limit, begin + 15
    while True:
        try:
            found = look()
        except (Wrong, json.JSONDecodeError) as error:
            found, what_now = None, error
        else:
            what_now = found
        if found is True:
            return
        if time.monotonic() > end:
            raise Wrong(f"waited {limit} s in vain for {what}: {what_now}")
        if time.monotonic() > told:
            print(f"waiting for {what}: {what_now}", flush=True)
            told = end
        time.sleep(0.1)


class Hosts:
    def __init__(self, shell):
        self.shell = shell
        nodes = json.loads(kubectl("get", "nodes", "-o", "json"))["items"]
        self.nodes = [node["metadata"]["name"] for node in nodes]

    def on(self, node, script):
        return run(*shlex.split(self.shell.format(node=node)), "sh", "-c", script)

    def look(self):
        return {node: set(self.on(node, LOOK).splitlines()) for node in self.nodes}

    def brokers(self):
        return {node: self.on(node, BROKERS).strip() for node in self.nodes}


class Faults:
    def __init__(self, arguments):
        self.manifest = arguments.manifest
        self.text = open(arguments.manifest).read()
        self.other_image = arguments.other_image
        self.hosts = Hosts(arguments.node_shell)
        self.before = self.hosts.look()

    # The cluster as it is to be.

    def up(self):
        kubectl("apply", "-f", self.manifest)
        self.all_online()

    def all_online(self):
        until("all nodes Online", self.is_online)
        ours("rollout", "status", "daemonset/install-flux", "--timeout=120s")

    def is_online(self):
        found = json.loads(ours("get", "fluxnodes", "-o", "json"))["items"]
        phases = {node["metadata"]["name"]: node.get("status", {}).get("phase") for node in found}
        return phases == dict.fromkeys(self.hosts.nodes, "Online") or phases

    def flux(self, *words):
        """On the lead: a follower's view of a job's events may stay behind under load."""
        lead = json.loads(ours("get", "fluxinstance", "flux", "-o", "json"))["status"]["lead"]
        pods = json.loads(ours("get", "pods", "-o", "json", "--field-selector", f"spec.nodeName={lead}"))["items"]
        pod = next(pod["metadata"]["name"] for pod in pods if "deletionTimestamp" not in pod["metadata"])
        return ours("exec", pod, "--", "/flux-distribute", "connect", "--", "flux", *words)

    # What must hold after a fault.

    def is_clean(self):
        left = {node: sorted(now - self.before[node]) for node, now in self.hosts.look().items()}
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
        size = str(len(self.hosts.nodes))
        job = self.flux("submit", "-N", size, "-n", size, "sleep", "inf").strip()
        self.flux("job", "wait-event", "-t", "20", "-p", "exec", job, "shell.start")
        brokers = self.hosts.brokers()
        fault()
        self.all_online()
        after = self.hosts.brokers()
        events = self.flux("job", "eventlog", job)
        self.flux("cancel", job)
        self.flux("job", "wait-event", "-t", "30", job, "clean")
        if after != brokers:
            raise Wrong(f"other brokers: {brokers} before, {after} after")
        if re.search(r" (exception|finish) ", events):
            raise Wrong(f"the job is lost: {events}")

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
        # Who deletes an instance does not get it back by applying the file again.
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
            until("all nodes Online", self.is_online)
            time.sleep(10)
            ours("rollout", "undo", "daemonset/install-flux")
            update(strategy)

        self.kept(fault)

    def images(self):
        pods = json.loads(ours("get", "pods", "-o", "json"))["items"]
        return [pod["spec"]["containers"][0]["image"] for pod in pods]


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
}
# These need --other-image.
TWO_BUILDS = [Faults.roll_back_in_the_middle, Faults.two_builds_side_by_side]


def figures(seconds):
    return f"{statistics.median(seconds):.1f} s | {max(seconds):.1f} s" if seconds else "- | -"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--manifest", required=True)
    parser.add_argument("--node-shell", required=True)
    parser.add_argument("--other-image")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--rows", default="")
    arguments = parser.parse_args()
    faults, table, failed = Faults(arguments), [], 0
    for name, inject in ROWS.items():
        if not any(word in name for word in arguments.rows.split(",")):
            continue
        if inject in TWO_BUILDS and not arguments.other_image:
            print(f"skipped: {name}: no --other-image")
            continue
        times, cleans, wrong = [], [], 0
        for turn in range(arguments.runs):
            try:
                faults.up()
                begin = time.monotonic()
                clean = inject(faults)
                times.append(time.monotonic() - begin)
                cleans += [clean] if clean else []
                print(f"{name} #{turn}: {times[-1]:.1f} s, clean hosts: {clean}", flush=True)
            except (Wrong, json.JSONDecodeError) as error:
                wrong += 1
                print(f"{name} #{turn}: FAILED: {error}", flush=True)
        failed += wrong
        table.append(f"| {name} | {arguments.runs} | {wrong} | {figures(cleans)} | {figures(times)} |")
    kubectl("delete", "-f", faults.manifest, "--ignore-not-found")
    head = "| fault | runs | failed | hosts clean: median | max | all done: median | max |\n|---|--:|--:|--:|--:|--:|--:|"
    print("\n".join([head, *table]))
    sys.exit(1 if failed else 0)


main()
