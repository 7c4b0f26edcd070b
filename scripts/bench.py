#!/usr/bin/env python3
"""Measures what docs/measured.md says about scale, and writes it there: JSON in target/bench.json, and a Markdown table. Unless
it ran as a whole, the page stays as it is, and the table is in target/bench.md. If a part failed or lacks what it needs, the exit code is 1.
As root, it begins with an empty page cache: what this machine has cached is dropped.

    make bench                  or scripts/bench.py, as root: local nodes need it; with FLUX_PREFIX and KUBEBUILDER_ASSETS as for the tests (docs/operations.md)
    scripts/bench.py --of target/bench.json     measures nothing: writes the table of these results into the page, even if parts are missing

NODES="10 100 1000": numbers of nodes; these are the default. Those that this machine's memory does not allow are not run: each node takes up to 6 MiB.
SECONDS_IDLE=300: how long to count once all are online; each watch begins anew within 290 s.
PLANNED=5000: nodes of the bench of the planner alone.
SECONDS_AGENT=150: how long to count idle agents.
TURNS=20: joins, starts and epochs of local nodes.
ONLY="counts planner": these parts alone, of counts, planner, pure, account, agent, waits, sizes; the others' rows say so.
BENCH_PROFILE=dev: build the benches without optimisation; agents of local nodes are the image's nevertheless. Counts hold then, and times are not judged.
"""

import array
import concurrent.futures
import datetime
import hashlib
import json
import os
import pathlib
import platform
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
PAGE = ROOT / "docs" / "measured.md"
PARTIAL = ROOT / "target" / "bench.md"
BEGIN, END = "<!-- make bench writes from here -->", "<!-- to here -->"
PROFILE = os.environ.get("BENCH_PROFILE", "bench")
ASSETS = os.environ.get("KUBEBUILDER_ASSETS", "")
FLUX = os.environ.get("FLUX_PREFIX", "/opt/flux")
PARTS = ["counts", "planner", "pure", "account", "agent", "waits", "sizes"]
ONLY = os.environ.get("ONLY", " ".join(PARTS)).split()
PLANNED = int(os.environ.get("PLANNED", "5000"))
BENCHES = ["account", "counts", "planner", "pure"]
# Functions of benches/pure.rs.
JOIN = ["index", "decide_join", "observe_members", "project_all", "instance_status"]
FLAT = 1.3
# Seconds from a report to the roster, without those in which the planner only waits: it gathers changes for at least GATHER, and
# between the begins of two rounds are at least APART (both in crate planner, reconcile/changes.rs).
LONGEST_JOIN, GATHER, APART = 0.1, 0.02, 0.1
LIMIT_OF_JOIN = "each round decides anew for all nodes"
MEBI = 1 << 20
# How the reason begins if a part began and failed.
FAILED = "the bench failed"
LEFT_OUT = "ONLY left it out"
# Of results. To be raised if what a key means changes.
FORMAT = 3
# What this script has started and not yet seen end.
RUNNING = set()
# An agent of this bench takes up to 3 MiB, kube-apiserver 1.7 MiB for it and its Node, etcd 0.8 MiB.
MEBIBYTES_PER_NODE = 6
# More take longer than half an hour on a few cores: 5,000 kubelets alone write 500 Nodes of 15 kB in a second.
LARGEST = 1000
NUMBERS = [10, 100, LARGEST]


def available_mebibytes():
    for line in pathlib.Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) // 1024
    return 0


def numbers_of_nodes():
    return sorted(map(int, os.environ["NODES"].split())) if "NODES" in os.environ else NUMBERS


def is_too_many(nodes):
    """True if this machine's free memory does not allow this many. Numbers in NODES are taken as they are."""
    return "NODES" not in os.environ and nodes * MEBIBYTES_PER_NODE >= available_mebibytes() / 2


def build():
    """Builds all benches, and the program for the image; returns the executables by name."""
    command = ["cargo", "bench", "--locked", "--profile", PROFILE, "--no-run", "--message-format=json-render-diagnostics"]
    command += [word for name in BENCHES for word in ("--bench", name)]
    built = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    messages = [json.loads(line) for line in built.splitlines() if line.startswith("{")]
    executables = {one["target"]["name"]: one["executable"] for one in messages if one.get("executable")}
    if {"agent", "waits", "sizes"} & set(ONLY):
        subprocess.run(["scripts/image-binary.sh"], cwd=ROOT, check=True)
        triple = subprocess.run(["rustc", "--print", "host-tuple"], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
        executables["image"] = TARGET / triple / "image" / "flux-distribute"
    return executables


def run(*command, seconds=1500, **environment):
    """What a command prints; None if it fails, or takes longer."""
    words = [str(word) for word in command]
    print("$", *words, file=sys.stderr, flush=True)
    begin = time.monotonic()
    # In a session of its own, so that nothing that it has started is left behind if it is cut off.
    with subprocess.Popen(words, cwd=ROOT, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        RUNNING.add(process)
        try:
            printed, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            end(process)
            printed, _ = process.communicate()
        RUNNING.discard(process)
    print(f"$ {pathlib.Path(words[0]).name} {' '.join(words[1:])}: status {process.returncode} after {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    return printed if process.returncode == 0 else None


def end(process):
    """Ends a command and what it has started. A script first takes its local nodes down."""
    process.terminate()
    try:
        process.wait(timeout=60)
    except subprocess.TimeoutExpired:
        pass
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def objects(text):
    return [json.loads(line) for line in (text or "").splitlines() if line.startswith("{")]


def criterion(name):
    """The median in milliseconds."""
    file = TARGET / "criterion" / name / "new" / "estimates.json"
    return json.loads(file.read_text())["median"]["point_estimate"] / 1e6 if file.exists() else None


def row(what, aim, measured, verdict):
    return {"what": what, "aim": aim, "measured": measured, "verdict": verdict}


def not_run(what, aim, why):
    return row(what, aim, why, "failed") if why.startswith(FAILED) else row(what, aim, f"not run: {why}", "not run")


def judged(is_met, limit=""):
    """is_met: None if there is nothing to judge by. limit: what keeps the aim from being met."""
    return {True: "met", False: f"not met: {limit}" if limit else "not met", None: "not judged"}[is_met]


def rows(found, aims):
    """found: what a part of the bench has found, or why it was not run. aims: what is measured, the aim, and a function of `found`: it returns what was
    measured and the verdict."""
    if isinstance(found, str):
        return [not_run(what, aim, found) for what, aim, _ in aims]
    return [row(what, aim, *of(found)) for what, aim, of in aims]


def unless_dev(profile, is_met):
    """Times of a build without optimisation are not judged."""
    return None if profile == "dev" else is_met


def for_each(counted, of, form):
    return ", ".join(f"{one['nodes']:,}: {form.format(of(one))}" for one in counted)


def flat(counted, asked, what, of, form, limit=""):
    values = [of(one) for one in counted]
    ratio = max(values) / values[0] if values[0] else float(max(values) > 0)
    measured = f"{for_each(counted, of, form)} ({ratio:.2f} ×)"
    # One number of nodes has nothing to stand beside, and the others say nothing of one that was not counted.
    is_whole = len(values) > 1 and asked == [one["nodes"] for one in counted]
    return row(what, f"flat within {FLAT} ×", measured, judged(ratio <= FLAT if is_whole else None, limit))


def joins(found, longest, profile):
    """Median and worst, and the verdict on the median. longest: in seconds."""
    median, worst = statistics.median(found["join_secs"]), max(found["join_secs"])
    return f"{median * 1000:.0f} ms, {worst * 1000:.0f} ms of {len(found['join_secs'])}", judged(unless_dev(profile, median <= longest), LIMIT_OF_JOIN)


def rows_of_counts(counted, asked, profile):
    def of_start(name):
        return lambda one: one["start"]["plain"][name]

    def per_minute(who, name):
        return lambda one: one["steady"][who][name] * 60 / one["steady_secs"]

    def bytes_of(what):
        return lambda one: one["start"]["plain"]["by_bytes"].get(what, 0)

    def of_ranks(one):
        return bytes_of("get configmaps/flux-roster")(one) + bytes_of("get configmaps/flux-broker")(one)

    def without_watches(one):
        start = one["start"]["plain"]
        return start["requests"] - sum(number for what, number in start["by_request"].items() if what.startswith("watch "))

    of_instance = bytes_of("watch fluxinstances")

    def other_bytes(one):
        return of_start("bytes")(one) - of_ranks(one) - of_instance(one)

    def at_most_once(what, of):
        # Each watch begins anew within 290 s: a shorter count does not see that.
        is_long_enough = all(one["steady_secs"] >= 290 for one in counted)
        is_met = all(of(one) <= 1 for one in counted) if is_long_enough else None
        return row(what, "≤ 1", for_each(counted, of, "{:.2f}"), judged(is_met))

    def not_judged(what, of, form):
        return row(what, "no aim", for_each(counted, of, form), "–")

    seconds = " and ".join(sorted({f"{one['steady_secs']:.0f}" for one in counted}))
    last = counted[-1]
    failover = last["failover"]
    storm = failover["plain"]["requests"]
    return [
        flat(counted, asked, "start, packages there: requests of an agent", of_start("requests"), "{:.1f}", "a busy API server turns requests away, and each is made again after a pause"),
        flat(counted, asked, "the same without those that begin a watch", without_watches, "{:.1f}", "the same"),
        not_judged("requests of all agents and planners that the API server turned away (429, 503, 504), from the first agent's start until 30 s after the failover", lambda one: one["turned_away"], "{:,}"),
        flat(counted, asked, "start, packages there: rounds of an agent", of_start("rounds"), "{:.1f}", "a longer start has more rounds that begin only because the agent has rested for 10 or 30 s"),
        not_judged("of them: began 10 s or more after the one before", of_start("resyncs"), "{:.1f}"),
        flat(counted, asked, "start, packages there: watch events to an agent", of_start("events"), "{:.1f}", "a longer start has more changes of the FluxInstance's status"),
        flat(counted, asked, "start, packages there: bytes to an agent, but for the next two rows", other_bytes, "{:,.0f} B"),
        flat(counted, asked, "start, packages there: bytes of roster and broker.toml to an agent", of_ranks, "{:,.0f} B", "both name all ranks, and a broker reads both at its start; packed from 32 KiB on"),
        flat(counted, asked, "start, packages there: bytes of the FluxInstance to an agent", of_instance, "{:,.0f} B", "each change of its status is sent to all, and a longer start has more of them"),
        at_most_once(f"idle: requests of an agent in a minute, counted for {seconds} s", per_minute("plain", "requests")),
        flat(counted, asked, "idle: rounds of an agent in a minute", per_minute("plain", "rounds"), "{:.1f}"),
        flat(counted, asked, "idle: bytes to an agent in a minute", per_minute("plain", "bytes"), "{:,.0f} B"),
        at_most_once("idle: requests of the lead's agent in a minute", per_minute("lead", "requests")),
        not_judged("all nodes online, from the agents' start; all share this machine", lambda one: one["online_secs"], "{:.1f} s"),
        row(
            f"planner among {last['nodes']:,}: a join, from the report of the host to the published roster, with up to 100 ms between the round that the new FluxNode began and the next: median, worst; all share this machine",
            f"median ≤ {(LONGEST_JOIN + APART) * 1000:.0f} ms",
            *joins(last, LONGEST_JOIN + APART, profile),
        ),
        row(
            f"planner killed among {last['nodes']:,}: another agent has the Lease after; requests of an agent until 30 s after that, of the new planner",
            "≤ 20 s; < 1, no aim",
            f"{last['failover_secs']:.1f} s; {storm:.2f}, {failover['successor']['requests']}",
            judged(unless_dev(profile, last["failover_secs"] <= 20 and storm < 1)),
        ),
        not_judged("mean time between two heartbeats of a Node; 10 s if the API server keeps up", lambda one: one["between_heartbeats_secs"], "{:.1f} s"),
        not_judged("memory of an agent and its client here, all in one process; not that of a pod", lambda one: one["bytes_of_memory_per_agent"] / MEBI, "{:.1f} MiB"),
    ]


def rows_of_planner(found, profile):
    what = f"planner at {found['nodes']:,}" if isinstance(found, dict) else "planner in a process of its own"
    agents = f"{found['nodes']:,} agents" if isinstance(found, dict) else "all agents"

    def join(found):
        return joins(found, LONGEST_JOIN + GATHER, profile)

    def memory(found):
        most = max(found["memory_mib"]["most"], found["failover"]["most_memory"]) * MEBI
        return f"{most / 1e6:.0f} MB", judged(most <= 200e6)

    def failover(found):
        failover = found["failover"]
        measured = f"{failover['taken_secs']:.1f} s, {failover['planned_secs']:.1f} s; {failover['requests']:.0f}"
        return measured, judged(unless_dev(profile, failover["planned_secs"] <= 20 and failover["requests"] <= 100))

    def idle(found):
        idle, heartbeat = found["idle"], found["cpu_secs_of_heartbeat"]
        share = idle["cpu_share"] + found["nodes"] / 10 * heartbeat
        return f"{idle['cpu_share'] * 100:.1f} %, {idle['requests_per_minute']:.0f}; {heartbeat * 1e6:.0f} µs, which makes {share * 100:.0f} %", "–"

    def appeared(found):
        start = found["start"]
        measured = f"{start['appeared_secs']:.1f} s, {start['roster_secs']:.1f} s, {start['online_secs']:.1f} s"
        is_met = start["roster_secs"] <= start["appeared_secs"] + 30
        # If they appear more slowly than within 10 s, less is asked of the planner.
        return measured, judged(unless_dev(profile, None if is_met and start["appeared_secs"] > 10 else is_met))

    def peak(found):
        most, mean = found["start"]["requests_in_busiest_second"], found["start"]["requests"] / found["start"]["online_secs"]
        return f"{most:.0f}; {mean:.0f} ({most / mean:.1f} ×)", judged(most <= 3 * mean if found["start"]["appeared_secs"] <= 10 else None)

    return rows(
        found,
        [
            (f"{what}: a join, from the report of the host to the published roster, with at least 20 ms to gather: median, worst", f"median ≤ {(LONGEST_JOIN + GATHER) * 1000:.0f} ms", join),
            (f"{what}: its process's memory, most", "≤ 200 MB", memory),
            (f"{what}, killed: another one has the Lease, has planned; its requests", "≤ 20 s; ≤ 100", failover),
            (f"{what}: mean of a round, while nodes join", "no aim", lambda found: (f"{found['round_secs'] * 1000:.0f} ms", "–")),
            (f"{what}, idle: share of a core, requests in a minute; processor time of one heartbeat; share of a core if each Node has a heartbeat in 10 s", "no aim", idle),
            (f"{agents} begin, as fast as the API server takes them: all FluxNodes made, all in the roster, all online", "in the roster ≤ 30 s after the last, if all appear within 10 s", appeared),
            ("the same: requests of the planner in the busiest second; mean of all seconds", "≤ 3 ×, if all appear within 10 s", peak),
            ("the same: rounds of the planner, its processor time", "no aim", lambda found: (f"{found['start']['rounds']:.0f}, {found['start']['cpu_secs']:.1f} s", "–")),
        ],
    )


def rows_of_agent(found, profile):
    what = "an idle agent, the worst of those that watch no Lease"

    def size(found):
        memory, share = found["rss_mib"], found["share_of_core"] * 100
        measured = f"{memory:.1f} MiB ({found['anonymous_mib']:.1f}), {found['threads']}, {share:.2f} %; {found['agents']} agents for {found['seconds']:.0f} s"
        limits = ["most of the memory is the executable, as far as the kernel has mapped it"] if memory > 15 else []
        limits += ["too many threads"] if found["threads"] > 6 else []
        limits += ["too much processor time: see the next row"] if share > 0.1 else []
        return measured, judged(unless_dev(profile, not limits), "; ".join(limits))

    def of_round(found):
        each, of_stage = found["cpu_ms_in_30_secs"], found["stage_ms_in_30_secs"]
        limits = [f"{of_stage:.0f} ms are the host stage, a process of its own, and {each - of_stage:.0f} ms the agent's own"] if each > 5 else []
        limits += ["it wrote or asked something"] if found["written_bytes"] + found["requests"] else []
        return f"{each:.1f} ms ({of_stage:.1f}), {found['written_bytes']}, {found['requests']:.0f}", judged(unless_dev(profile, not limits), "; ".join(limits))

    return rows(
        found,
        [
            (f"{what}: RSS (of it anonymous), threads, share of a core", "≤ 15 MiB, ≤ 6, ≤ 0.1 % over 10 minutes", size),
            (f"{what}: processor time in 30 s, the longest rest between two rounds (of it the host stage); bytes written, requests in all that time", "≤ 5 ms, 0, 0", of_round),
        ],
    )


def rows_of_waits(found, profile):
    def beside(ours, bare):
        def of(found):
            our, its = found[ours]["median"], found[bare]["median"]
            return f"{our:.2f} s, {its:.2f} s: {our / its:.2f} × (medians of {found['turns']})", judged(unless_dev(profile, our <= 2 * its))

        return of

    def join(found):
        join = found["join"]
        return f"{join['median']:.2f} s, {join['worst']:.2f} s of {found['turns']}", judged(unless_dev(profile, join["worst"] <= 2))

    return rows(
        found,
        [
            ("epoch change of 4 local nodes without jobs, packages there: all free again; beside it, `flux start --test-size=4`, its start and stop", "≤ 2 ×", beside("restart", "bare_whole")),
            ("4 local nodes, packages there, power on: all free; beside it, start of the same", "≤ 2 ×", beside("power", "bare_start")),
            ("a node joins beside a job on three others, from `kubectl scale` to its job's alloc: median, worst", "≤ 2 s, worst of 20", join),
        ],
    )


def rows_of_pure(found, profile):
    def render(found):
        took = found["milliseconds"]["render"]
        return f"{took:.1f} ms, {kilobytes(found, 'broker_toml')}", judged(unless_dev(profile, took <= 50))

    def roster(found):
        write, read = (found["milliseconds"][name] for name in ("write_roster", "read_roster"))
        return f"{write:.1f} ms, {read:.1f} ms, {kilobytes(found, 'roster')}", "–"

    def kilobytes(found, name):
        return ", ".join(f"{found[f'{name}_{form}'] / 1000:.0f} kB" for form in ("bytes", "packed"))

    return rows(
        found,
        [
            ("broker.toml for 10,000 nodes in 20 kinds: rendered, size, packed", "≤ 50 ms", render),
            ("roster of 5,000: written and packed, read, size, packed", "no aim", roster),
            ("of a join among 5,000: index Nodes and reports, decide, observe all members, project onto all FluxNodes, status", "no aim", lambda found: (", ".join(f"{found['milliseconds'][name]:.1f} ms" for name in JOIN), "–")),
        ],
    )


def rows_of_account(found):
    def held(found):
        return (
            f"{found['first_secs']:.1f} s; {found['memory_mib']} MiB, {found['cpu_secs']:.1f} s; a rollout took {found['rollout_secs']:.1f} s, followed {found['followed_secs']:.1f} s later",
            "–",
        )

    return rows(found, [("account: 1,000 nodes with four other pods each are held in Flux after; the bridge's memory, its processor time; how long a rollout of one pod of each takes, and how much later the bridge has followed", "no aim", held)])


def rows_of_sizes(found):
    aims = [("image; binary in it", "≤ 20 MiB; ≤ 19 MiB", lambda found: (f"{found['image']:.1f} MiB; {found['binary']:.1f} MiB", judged(found["image"] <= 20 and found["binary"] <= 19)))]
    return rows(found, aims)


def rows_by_hand():
    """What needs more than this machine alone."""
    return [
        not_run("one apply on 3 kubelets: pods started to all free, packages there; and cold", "≤ 2 × bare brokers + 1 s; cold: that + 1.3 × fetch and unpack", "it needs a cluster: scripts/cluster_waits.py, whose figures are below"),
        not_run("cold install beside py-rattler", "not slower", "it needs PyPI: scripts/bench-packages.sh, whose figures are below"),
    ]


def sizes(binary):
    """Of image and binary, in MiB; or why they are not known."""
    with tempfile.TemporaryDirectory() as place:
        image = pathlib.Path(place) / "image.tar"
        if run("scripts/image.sh", image, BINARY=str(binary)) is None:
            return f"{FAILED}: scripts/image.sh"
        return {"image": image.stat().st_size / MEBI, "binary": binary.stat().st_size / MEBI}


def pure(executable):
    """Sizes, and the median time of each function in milliseconds."""
    found = first_object(run(executable, "--bench"))
    if isinstance(found, str):
        return found
    times = {name: criterion(name) for name in ["render", "write_roster", "read_roster", *JOIN]}
    return {**found, "milliseconds": times} if None not in times.values() else f"{FAILED}: criterion has left no result"


def git(*words):
    return subprocess.run(["git", *words], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False).stdout.strip()


def versions():
    rustc = subprocess.run(["rustc", "--version"], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    server = pathlib.Path(ASSETS) / "kube-apiserver"
    api = subprocess.run([server, "--version"], stdout=subprocess.PIPE, text=True, check=True).stdout.strip() if server.exists() else "no kube-apiserver"
    commit = git("rev-parse", "--short", "HEAD")
    # The page is what this script writes.
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", f":!{PAGE.relative_to(ROOT)}")
    commit += " with changes" if changed else ""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30
    return {
        "format": FORMAT,
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, {memory} GiB, Linux {platform.release()}",
        "versions": f"commit {commit}, {rustc}, {api}",
        "profile": PROFILE,
    }


def drop_page_cache():
    """Two runs begin alike, whatever was read or built before: on a virtual machine whose page cache held 10 GB, steps through memory took ten times as
    long as after this."""
    os.sync()
    place = pathlib.Path("/proc/sys/vm/drop_caches")
    if os.access(place, os.W_OK):
        place.write_text("3")


def gauges():
    """Seconds that two fixed loops take. If they take longer than in another run, this machine is slower or busy, so longer times say nothing about the
    code. Hashing does not wait for memory; each step of the walk does."""
    begin, hasher = time.monotonic(), hashlib.sha256()
    for _ in range(1024):
        hasher.update(bytes(MEBI))
    hashed = time.monotonic() - begin
    # A linear congruential generator of full period (Hull and Dobell): one cycle through all entries, in an order that no cache foresees.
    entries, at = 8 * MEBI, 0
    following = array.array("Q", ((1664525 * entry + 1013904223) % entries for entry in range(entries)))
    begin = time.monotonic()
    for _ in range(2 * MEBI):
        at = following[at]
    return {"hash_secs": hashed, "walk_secs": time.monotonic() - begin}


def about(result):
    first, last = result["gauges"]
    return (
        f"{result['date']}; {result['machine']}; {result['versions']}; cargo profile `{result['profile']}`. The suite took {result['seconds'] / 60:.0f} minutes. "
        f"Before and after it, one core hashed 1 GiB by SHA-256 in {first['hash_secs']:.2f} and {last['hash_secs']:.2f} s, and took 2 Mi steps through 64 MiB of memory, "
        f"each of which waits for the one before, in {first['walk_secs']:.2f} and {last['walk_secs']:.2f} s."
    )


def table(result):
    counted, profile = result["counted"], result["profile"]
    found = rows_of_counts(counted, result["asked"], profile) if counted else []
    missing, aim = set(result["asked"]) - {one["nodes"] for one in counted}, f"flat within {FLAT} ×"
    why = lambda nodes: "this machine has too little free memory" if nodes in result["too_many"] else f"{FAILED}, or took too long"
    found += [not_run(f"what an agent costs among {nodes:,}", aim, why(nodes)) for nodes in sorted(missing)]
    if result["not_counted"]:
        found.append(not_run("what an agent costs", aim, result["not_counted"]))
    elif 5000 not in result["asked"]:
        found.append(not_run("what an agent costs among 5,000", aim, "NODES leaves it out: two cores can't carry 5,000 agents; see below"))
    found += rows_of_planner(result["planner"], profile)
    found += rows_of_agent(result["agent"], profile)
    found += rows_of_waits(result["waits"], profile)
    found += rows_of_pure(result["pure"], profile)
    found += rows_of_account(result["account"])
    found += rows_of_sizes(result["sizes"])
    found += rows_by_hand()
    lines = [about(result), "", "| what | aim | measured | verdict |", "|---|---|---|---|"]
    lines += [f"| {one['what']} | {one['aim']} | {one['measured']} | {one['verdict']} |" for one in found]
    return "\n".join(lines)


def lacking(part, *needs):
    """Why a part can't run; None if it can. needs: of `flux`, `api`, `root`."""
    if part not in ONLY:
        return LEFT_OUT
    if "api" in needs and not (pathlib.Path(ASSETS) / "kube-apiserver").exists():
        return "KUBEBUILDER_ASSETS names no kube-apiserver"
    if "flux" in needs and not (pathlib.Path(FLUX) / "bin" / "flux").exists():
        return "FLUX_PREFIX names no Flux"
    if "root" in needs and os.geteuid() != 0:
        return "local nodes need root"
    return None


def first_object(text):
    return (objects(text) or [FAILED])[0]


def on_local_nodes(built, script, *arguments):
    """What a script prints that measures local nodes with a real Flux."""
    with tempfile.TemporaryDirectory() as place:
        bundle, binary = f"{place}/flux.tar.gz", built["flux-distribute"]
        if run(binary, "bundle", "create", "--from-prefix", FLUX, "--out", bundle) is None:
            return f"{FAILED}: no bundle could be made of FLUX_PREFIX"
        path = f"{os.environ['PATH']}:{ASSETS}"
        # The agents are what clusters run.
        return first_object(run(sys.executable, f"scripts/{script}", *arguments, BUNDLE=bundle, BINARY=binary, PATH=path, FLUX_DISTRIBUTE_LOCAL_AGENT=str(built["image"])))


def end_early(*_):
    for process in list(RUNNING):
        end(process)
    # Threads may still wait for commands that were to follow.
    os._exit(1)


def shortfalls(result):
    """What keeps this from being a whole run: parts that failed or lack what they need, and what the settings leave out."""
    reasons = [result["not_counted"], *(result[part] for part in PARTS if part != "counts")]
    reasons = [reason for reason in reasons if isinstance(reason, str)]
    counted = {one["nodes"] for one in result["counted"]}
    failed = [reason for reason in reasons if reason != LEFT_OUT]
    failed += [f"{nodes:,} nodes were not counted" for nodes in result["asked"] if nodes not in counted]
    left_out = [reason for reason in reasons if reason == LEFT_OUT]
    left_out += [f"NODES left out {nodes:,}" for nodes in NUMBERS if result["not_counted"] is None and nodes not in result["asked"]]
    left_out += [f"{name} is set" for name in result["set"]]
    return failed, left_out


def measure():
    # Connections of agents and planners, sockets of played brokers, and the API server's end of the connections: more than the usual 1,024 open files.
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    begin = time.monotonic()
    built = build()
    print(f"built after {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    drop_page_cache()
    begin, result, first = time.monotonic(), versions(), gauges()
    result["set"] = [name for name in ("BENCH_PROFILE", "PLANNED", "SECONDS_IDLE", "SECONDS_AGENT", "TURNS") if name in os.environ]
    result["not_counted"] = lacking("counts", "api")
    result["asked"] = [] if result["not_counted"] else numbers_of_nodes()
    result["too_many"] = [nodes for nodes in result["asked"] if is_too_many(nodes)]
    fitting = [nodes for nodes in result["asked"] if nodes not in result["too_many"]]
    # An idle agent alone on the machine: others would cost it time.
    result["agent"] = lacking("agent", "flux", "root") or on_local_nodes(built, "bench_agent.py", os.environ.get("SECONDS_AGENT", "150"))
    counting = lambda nodes: objects(run(built["counts"], os.environ.get("SECONDS_IDLE", "300"), nodes, seconds=1500 if nodes <= LARGEST else 7200))
    # The small ones at the same time: they mostly wait. Their times are not judged.
    with concurrent.futures.ThreadPoolExecutor() as pool:
        found = list(pool.map(counting, [nodes for nodes in fitting if nodes <= 100]))
    found += [counting(nodes) for nodes in fitting if nodes > 100]
    result["counted"] = sorted((one for each in found for one in each), key=lambda one: one["nodes"])
    result["planner"] = lacking("planner", "api") or first_object(run(built["planner"], PLANNED))
    result["waits"] = lacking("waits", "flux", "root") or on_local_nodes(built, "bench_waits.py", os.environ.get("TURNS", "20"))
    result["pure"] = lacking("pure") or pure(built["pure"])
    result["account"] = lacking("account", "api", "flux") or first_object(run(built["account"], "1000", "4", seconds=600))
    result["sizes"] = lacking("sizes") or sizes(built["image"])
    result["gauges"] = [first, gauges()]
    result["seconds"] = round(time.monotonic() - begin)
    (ROOT / "target").mkdir(exist_ok=True)
    (ROOT / "target" / "bench.json").write_text(json.dumps(result, indent=1) + "\n")
    return result


def main():
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, end_early)
    is_stored = sys.argv[1:2] == ["--of"]
    result = json.loads(pathlib.Path(sys.argv[2]).read_text()) if is_stored else measure()
    if result.get("format") != FORMAT:
        sys.exit(f"{sys.argv[2]} is of another version of this script: measure again")
    text = table(result)
    print(text)
    failed, left_out = shortfalls(result)
    if is_stored or not failed + left_out:
        before, rest = PAGE.read_text().split(BEGIN)
        PAGE.write_text(before + BEGIN + "\n" + text + "\n" + END + rest.split(END, 1)[1])
        return
    PARTIAL.write_text(text + "\n")
    print(f"{PAGE} stays as it is, and the table is in {PARTIAL}: {'; '.join(failed + left_out)}", file=sys.stderr)
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
