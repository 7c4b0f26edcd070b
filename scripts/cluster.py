"""A real cluster that can be damaged, its hosts, and rows of things that are done to it: for cluster_faults.py, cluster_elastic.py,
cluster_pods.py, cluster_account.py and cluster_waits.py."""

import argparse, json, re, shlex, statistics, subprocess, sys, time

NAMESPACE = "flux-distribute"
# Without what a broker has just forked for a program.
BROKERS = r"""for process in /proc/[0-9]*; do read -r name < $process/comm; case $name in flux-broker*)
echo $name ${process#/proc/} $(sed 's/.*) //' $process/stat | cut -d ' ' -f 20);; esac; done 2>/dev/null | sort -nk 3 | head -n 1"""


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
    """Looks until it finds True: anything else tells why not yet."""
    begin = time.monotonic()
    end, told = begin + limit, begin + 15
    while True:
        try:
            found = look()
        except (Wrong, json.JSONDecodeError, KeyError) as error:
            found, what_now = None, error
        else:
            what_now = found
        if found is True:
            return
        if time.monotonic() > end:
            raise Wrong(f"waited {limit} s in vain for {what}: {str(what_now)[:2000]}")
        if time.monotonic() > told:
            print(f"waiting for {what}: {str(what_now)[:400]}", flush=True)
            told = end
        time.sleep(0.1)


def until_is(wanted, what, look, limit=120):
    """Looks until it finds what is wanted."""
    until(f"{what}: {wanted}", lambda: (found := look()) == wanted or found, limit)


class Cluster:
    """All of its nodes are to be in the instance."""

    def __init__(self, arguments):
        self.manifest = arguments.manifest
        self.shell, self.power_command = arguments.node_shell, arguments.power
        nodes = json.loads(kubectl("get", "nodes", "-o", "json"))["items"]
        self.nodes = [node["metadata"]["name"] for node in nodes]

    def on(self, node, script):
        return run(*shlex.split(self.shell.format(node=node)), "sh", "-c", script)

    def power(self, action, node):
        run(*shlex.split(self.power_command.format(action=action, node=node)))

    def up(self):
        kubectl("apply", "-f", self.manifest)
        self.all_online()

    def down(self):
        kubectl("delete", "-f", self.manifest, "--ignore-not-found")

    def all_online(self):
        until("all nodes Online", lambda: self.are_online(self.nodes))
        ours("rollout", "status", "daemonset/install-flux", "--timeout=120s")

    def phases(self):
        found = json.loads(ours("get", "fluxnodes", "-o", "json"))["items"]
        return {node["metadata"]["name"]: node.get("status", {}).get("phase") for node in found}

    def are_online(self, nodes):
        """These and no others."""
        phases = self.phases()
        return sorted(node for node, phase in phases.items() if phase == "Online") == sorted(nodes) or phases

    def instance(self):
        return json.loads(ours("get", "fluxinstance", "flux", "-o", "json"))

    def set(self, **spec):
        ours("patch", "fluxinstance", "flux", "--type=merge", "-p", json.dumps({"spec": spec}))

    def flux(self, *words):
        """On the lead: a follower's view of a job's events may stay behind under load."""
        return self.on_lead("flux", *words)

    def on_lead(self, *words):
        """A command in the instance."""
        lead = self.instance()["status"]["lead"]
        pods = json.loads(ours("get", "pods", "-o", "json", "--field-selector", f"spec.nodeName={lead}"))["items"]
        pod = next(pod["metadata"]["name"] for pod in pods if "deletionTimestamp" not in pod["metadata"])
        return ours("exec", pod, "--", "/flux-distribute", "connect", "--", *words).strip()

    def broker(self, node):
        """Empty if there is none, as on a node that is off."""
        try:
            return self.on(node, BROKERS).strip()
        except Wrong:
            return ""

    def brokers(self):
        return {node: self.broker(node) for node in self.nodes}

    def same_brokers(self, before, but=()):
        now = self.brokers()
        if any(now[node] != before[node] for node in self.nodes if node not in but):
            raise Wrong(f"other brokers: {before} before, {now} now")

    def job_on(self, nodes, *options):
        """One that runs over so many nodes until it is cancelled."""
        job = self.flux("submit", *options, "-N", str(nodes), "-n", str(nodes), "sleep", "inf")
        self.flux("job", "wait-event", "-t", "20", "-p", "exec", job, "shell.start")
        return job

    def end(self, job):
        """Its events until now; it must have run undisturbed."""
        events = self.flux("job", "eventlog", job)
        self.flux("cancel", job)
        self.flux("job", "wait-event", "-t", "30", job, "clean")
        if re.search(r" (exception|finish) ", events):
            raise Wrong(f"the job is lost: {events}")


def figures(seconds):
    return f"{statistics.median(seconds):.1f} s | {max(seconds):.1f} s" if seconds else "- | -"


def main(about, rows, kind, add_arguments=lambda parser: None):
    """Runs each of `rows` some times on a cluster of `kind`: NAME -> METHOD, which may return seconds of its own."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--manifest", required=True)
    parser.add_argument("--node-shell", required=True)
    parser.add_argument("--power", help="a command with {action}, which is kill or start, and {node}")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--rows", default="")
    add_arguments(parser)
    arguments = parser.parse_args()
    cluster, table, failed = kind(arguments), [], 0
    for name, method in rows.items():
        if not any(word in name for word in arguments.rows.split(",")):
            continue
        if missing := cluster.misses(method):
            print(f"skipped: {name}: no {missing}")
            continue
        times, own, wrong = [], [], 0
        for turn in range(arguments.runs):
            try:
                cluster.up()
                begin = time.monotonic()
                seconds = method(cluster)
                times.append(time.monotonic() - begin)
                own += [seconds] if seconds else []
                print(f"{name} #{turn}: {times[-1]:.1f} s, {cluster.OWN}: {seconds}", flush=True)
            except (Wrong, json.JSONDecodeError) as error:
                wrong += 1
                print(f"{name} #{turn}: FAILED: {error}", flush=True)
        failed += wrong
        table.append(f"| {name} | {arguments.runs} | {wrong} | {figures(own)} | {figures(times)} |")
    cluster.down()
    head = f"| what | runs | failed | {cluster.OWN}: median | max | all done: median | max |\n|---|--:|--:|--:|--:|--:|--:|"
    print("\n".join([head, *table]))
    sys.exit(1 if failed else 0)
