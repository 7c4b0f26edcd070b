#!/usr/bin/env python3
"""Measures what docs/measured.md says about scale, and writes it there: JSON in target/bench.json, and a Markdown table.

    make bench                  or scripts/bench.py, as root: local nodes need it
    scripts/bench.py --of A.json B.json     measures nothing: writes the table of A, with B's counts for the numbers of nodes that A lacks

NODES="10 100 1000": numbers of nodes; these are the default, as far as this machine's memory allows it. Each takes up to 4 MiB.
SECONDS_IDLE=300: how long to count once all are online; each watch begins anew within 290 s.
PLANNED=5000: nodes of the bench of the planner alone.
SECONDS_AGENT=180: how long to count idle agents.
TURNS=6: joins, starts and epochs of local nodes.
ONLY="counts planner": these parts alone, of counts, planner, pure, account, agent, waits, sizes; the others' rows say so.
BENCH_PROFILE=dev: build without optimisation. Counts hold then, and times are not judged.
"""

import concurrent.futures
import datetime
import json
import os
import pathlib
import platform
import resource
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "measured.md"
BEGIN, END = "<!-- make bench writes from here -->", "<!-- to here -->"
PROFILE = os.environ.get("BENCH_PROFILE", "bench")
ASSETS = os.environ.get("KUBEBUILDER_ASSETS", "")
FLUX = os.environ.get("FLUX_PREFIX", "/opt/flux")
PARTS = ["counts", "planner", "pure", "account", "agent", "waits", "sizes"]
ONLY = os.environ.get("ONLY", " ".join(PARTS)).split()
PLANNED = int(os.environ.get("PLANNED", "5000"))
BENCHES = ["account", "counts", "planner", "pure"]
# Functions of benches/pure.rs.
JOIN = ["decide_join", "observe_members", "project_all", "instance_status"]
FLAT = 1.3
MEBI = 1 << 20
# What this script has started and not yet seen end.
RUNNING = set()
# An agent of this bench takes less than 1 MiB, kube-apiserver 1.7 MiB for it and its Node, etcd 0.8 MiB.
MEBIBYTES_PER_NODE = 4
# More than in half an hour on a few cores: 5,000 kubelets alone write 500 Nodes of 15 kB in a second.
LARGEST = 1000


def available_mebibytes():
    for line in pathlib.Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) // 1024
    return 0


def numbers_of_nodes():
    if "NODES" in os.environ:
        return [int(number) for number in os.environ["NODES"].split()]
    return [n for n in (10, 100, LARGEST) if n * MEBIBYTES_PER_NODE < available_mebibytes() / 2]


def build():
    """Builds all benches; returns their executables by name, and that of the program."""
    command = ["cargo", "bench", "--locked", "--profile", PROFILE, "--no-run", "--message-format=json-render-diagnostics"]
    command += [word for name in BENCHES for word in ("--bench", name)]
    built = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    messages = [json.loads(line) for line in built.splitlines() if line.startswith("{")]
    return {one["target"]["name"]: one["executable"] for one in messages if one.get("executable")}


def run(*command, seconds=1500, **environment):
    """What a command prints; None if it fails, or takes longer."""
    words = [str(word) for word in command]
    print("$", *words, file=sys.stderr, flush=True)
    begin = time.monotonic()
    with subprocess.Popen(words, cwd=ROOT, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True) as process:
        RUNNING.add(process)
        try:
            printed, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            # A script then takes its local nodes down.
            process.terminate()
            printed, _ = process.communicate()
        RUNNING.discard(process)
    print(f"$ {pathlib.Path(words[0]).name} {' '.join(words[1:])}: status {process.returncode} after {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    return printed if process.returncode == 0 else None


def objects(text):
    return [json.loads(line) for line in (text or "").splitlines() if line.startswith("{")]


def criterion(name):
    """The median in milliseconds."""
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    file = target / "criterion" / name / "new" / "estimates.json"
    return json.loads(file.read_text())["median"]["point_estimate"] / 1e6 if file.exists() else None


def row(what, aim, measured, is_met, limit=""):
    """limit: what keeps it from being met."""
    verdict = {True: "met", False: f"not met: {limit}" if limit else "not met", None: "not judged"}[is_met]
    return {"what": what, "aim": aim, "measured": measured, "verdict": verdict}


def missing(what, aim, why):
    return row(what, aim, f"not run: {why}", None)


def timed(is_met, profile=PROFILE):
    return is_met if profile != "dev" else None


def flat(counted, what, aim, of, form="{:.0f}", limit=""):
    values = [of(one) for one in counted]
    numbers = ", ".join(f"{one['nodes']:,}: {form.format(value)}" for one, value in zip(counted, values))
    ratio = max(values) / values[0] if values[0] else float(max(values) > 0)
    return row(what, aim, f"{numbers} ({ratio:.2f} ×)", ratio <= FLAT, limit)


def rows_of_counts(counted, profile):
    def of_start(name):
        return lambda one: one["start"]["plain"][name]

    def per_minute(name):
        return lambda one: one["steady"]["plain"][name] * 60 / one["steady_secs"]

    def bytes_of_all(one):
        start = one["start"]["plain"]
        return start["bytes_of_roster"] + start["bytes_of_broker_toml"]

    def without_watches(one):
        start = one["start"]["plain"]
        return start["requests"] - sum(number for what, number in start["by_request"].items() if what.startswith("watch "))

    def other_bytes(one):
        start = one["start"]["plain"]
        return start["bytes"] - bytes_of_all(one) - start["bytes_of_instance"]

    within = f"flat within {FLAT} ×"
    last = counted[-1]
    idle = per_minute("requests")
    storm = last["failover"]["plain"]["requests"]
    return [
        flat(counted, "cold start: requests of an agent", within, of_start("requests"), "{:.1f}"),
        flat(counted, "the same without those that begin a watch, which ends after 290 s", within, without_watches, "{:.1f}"),
        flat(counted, "cold start: rounds of an agent with a reason", within, lambda one: of_start("rounds")(one) - of_start("resyncs")(one), "{:.1f}"),
        row(
            "cold start: rounds of an agent only because the one before was 10 s ago",
            "no aim: as many as it takes",
            ", ".join(f"{one['nodes']:,}: {of_start('resyncs')(one):.1f}" for one in counted),
            None,
        ),
        flat(counted, "cold start: bytes to an agent, but for the next two rows", within, other_bytes),
        flat(counted, "cold start: bytes of roster and broker.toml to an agent, which name all ranks", within, bytes_of_all, limit="a broker reads both at its start, packed from 32 KiB on"),
        flat(counted, "cold start: bytes of the FluxInstance to an agent", within, lambda one: one["start"]["plain"]["bytes_of_instance"], limit="each change of its status is sent to all, and a longer start has more of them"),
        row(
            f"idle: requests of an agent in a minute, counted for {last['steady_secs']:.0f} s",
            "≤ 1",
            ", ".join(f"{one['nodes']:,}: {idle(one):.2f}" for one in counted),
            all(idle(one) <= 1 for one in counted),
        ),
        flat(counted, "idle: rounds of an agent in a minute", within, per_minute("rounds"), "{:.1f}"),
        row(
            "idle: requests of the lead's agent in a minute",
            "≤ 1",
            ", ".join(f"{one['nodes']:,}: {one['steady']['lead']['requests'] * 60 / one['steady_secs']:.2f}" for one in counted),
            all(one["steady"]["lead"]["requests"] * 60 / one["steady_secs"] <= 1 for one in counted),
        ),
        row("all nodes online, from the agents' start", "no aim: all agents share this machine", ", ".join(f"{one['nodes']:,}: {one['online_secs']:.1f} s" for one in counted), None),
        row(
            f"planner among {last['nodes']:,}: a join, from the report of the host to the published roster, with 100 ms to gather",
            "≤ 200 ms",
            f"{last['join_secs'] * 1000:.0f} ms",
            timed(last["join_secs"] <= 0.2, profile),
            "all agents share this machine",
        ),
        row(
            f"failover of the planner among {last['nodes']:,}, and requests of an agent meanwhile",
            "≤ 20 s, < 1",
            f"{last['failover_secs']:.1f} s, {storm:.2f}",
            last["failover_secs"] <= 20 and storm < 1,
        ),
        row("memory of an agent in this bench, all in one process", "no aim: not that of a pod", ", ".join(f"{one['nodes']:,}: {one['bytes_of_memory_per_agent'] / (1 << 20):.1f} MiB" for one in counted), None),
    ]


def rows_of_planner(found):
    what = f"planner at {PLANNED:,}"
    aims = {
        f"{what}: a join, from the report of the host to the published roster, without the 100 ms to gather: median, worst of 11": "≤ 100 ms",
        f"{what}: its process's memory, most": "≤ 200 MB",
        f"failover among {PLANNED:,}, planner killed: another one has the Lease, has planned; its requests": "≤ 20 s, ≤ 100",
        f"{what}: mean of a round, while nodes join": "no aim",
        f"{what}, idle: share of a core, requests in a minute; of a core for one heartbeat of a Node": "no aim",
        f"{PLANNED:,} nodes appear as fast as the API server takes them: all there, in the roster, online": "in the roster ≤ 30 s later",
        f"the same: requests of the planner in the busiest second, in the mean one": "≤ 3 ×",
        f"the same: rounds of the planner, of a core": "no aim",
    }
    if isinstance(found, str):
        return [missing(what, aim, found) for what, aim in aims.items()]
    join, memory, failover, idle, start = (found[part] for part in ("join_secs", "memory_mib", "failover", "idle", "start"))
    most, mean = max(memory["most"], failover["most_memory"]), start["requests"] / start["online_secs"]
    measured = [
        (
            f"{join['median'] * 1000:.0f} ms, {join['worst'] * 1000:.0f} ms",
            timed(join["median"] <= 0.1),
            "a round copies and compares what all nodes report, and no part of that takes more than a seventh",
        ),
        (f"{most * MEBI / 1e6:.0f} MB", most * MEBI <= 200e6, "Node, FluxNode and pod of each node are kept, and a round copies a part of them"),
        (
            f"{failover['taken_secs']:.1f} s, {failover['planned_secs']:.1f} s; {failover['requests']:.0f}",
            failover["planned_secs"] <= 20 and failover["requests"] <= 100,
        ),
        (f"{found['round_secs'] * 1000:.0f} ms", None),
        (f"{idle['cpu_share'] * 100:.1f} %, {idle['requests_per_minute']:.0f}; {found['cpu_secs_of_heartbeat'] * 1e6:.0f} µs", None),
        (f"{start['appeared_secs']:.1f} s, {start['roster_secs']:.1f} s, {start['online_secs']:.1f} s", timed(start["roster_secs"] <= start["appeared_secs"] + 30)),
        (f"{start['requests_in_busiest_second']:.0f}, {mean:.0f} ({start['requests_in_busiest_second'] / mean:.1f} ×)", start["requests_in_busiest_second"] <= 3 * mean),
        (f"{start['rounds']:.0f}, {start['cpu_secs']:.1f} s", None),
    ]
    return [row(what, aim, *rest) for (what, aim), rest in zip(aims.items(), measured)]


def rows_of_agent(found):
    what = "an idle agent, the worst of those that watch no Lease"
    aims = {
        f"{what}: RSS (of it anonymous), threads, share of a core": "≤ 15 MiB, ≤ 6, ≤ 0.1 %",
        f"{what}: processor time for each 10 s, which is one round; bytes written, requests in all that time": "≤ 5 ms, 0, 0",
    }
    if isinstance(found, str):
        return [missing(what, aim, found) for what, aim in aims.items()]
    memory, share, each = found["rss_mib"], found["share_of_core"] * 100, found["cpu_ms_per_round"]
    during = f"{found['agents']} agents, {found['program']} program, for {found['seconds']:.0f} s"
    measured = [
        (
            f"{memory:.1f} MiB ({found['anonymous_mib']:.1f}), {found['threads']}, {share:.2f} %; {during}",
            timed(memory <= 15 and found["threads"] <= 6 and share <= 0.1),
            "what is not anonymous is the executable, as far as the kernel has mapped it",
        ),
        (
            f"{each:.1f} ms, {found['written_bytes']}, {found['requests']:.0f}",
            timed(each <= 5 and found["written_bytes"] + found["requests"] == 0),
            "half of it starts the host stage, a process of its own, and ends it",
        ),
    ]
    return [row(what, aim, *rest) for (what, aim), rest in zip(aims.items(), measured)]


def rows_of_waits(found):
    aims = {
        "epoch change of 4 local nodes, packages there: all free again; beside it, `flux start --test-size=4`, its start and stop": "≤ 2 ×",
        "4 local nodes, packages there, power on: all free; beside it, start of the same": "≤ 2 ×",
        "a node joins beside a job on three others, from `kubectl scale` to its job's alloc: median, worst": "≤ 2 s",
    }
    if isinstance(found, str):
        return [missing(what, aim, found) for what, aim in aims.items()]

    def beside(ours, bare):
        ours, bare = found[ours]["median"], found[bare]["median"]
        return f"{ours:.2f} s, {bare:.2f} s: {ours / bare:.2f} × (medians of {found['turns']})", timed(ours <= 2 * bare)

    join = found["join"]
    of_join = f"{join['median']:.2f} s, {join['worst']:.2f} s of {found['turns']}"
    measured = [beside("restart", "bare_whole"), beside("power", "bare_start"), (of_join, timed(join["worst"] <= 2))]
    return [row(what, aim, said, is_met) for (what, aim), (said, is_met) in zip(aims.items(), measured)]


def rows_by_hand():
    """What needs more than this machine alone."""
    return [
        missing("one apply on 3 kubelets: pods started to all free, packages there; and cold", "≤ 2 × bare brokers + 1 s", "it needs a cluster: scripts/cluster_waits.py, whose figures are below"),
        missing("cold install beside py-rattler", "not slower", "it needs PyPI: scripts/bench-packages.sh, whose figures are below"),
    ]


def rows_of_pure(sizes):
    names = {"render": "broker.toml for 10,000 nodes in 20 kinds: rendered, size, packed", "roster": "roster of 5,000: written and packed, read, size, packed"}
    names["join"] = "of a join among 5,000: decide, observe all members, project onto all FluxNodes, status"
    if isinstance(sizes, str):
        return [missing(what, "≤ 50 ms" if key == "render" else "no aim", sizes) for key, what in names.items()]
    render, write, read = (criterion(name) for name in ("render", "write_roster", "read_roster"))
    kilobytes = lambda name: f"{sizes[name] / 1000:.0f} kB"
    return [
        row(names["render"], "≤ 50 ms", f"{render:.1f} ms, {kilobytes('broker_toml_bytes')}, {kilobytes('broker_toml_packed')}", timed(render <= 50)),
        row(names["roster"], "no aim", f"{write:.1f} ms, {read:.1f} ms, {kilobytes('roster_bytes')}, {kilobytes('roster_packed')}", None),
        row(names["join"], "no aim", ", ".join(f"{criterion(name):.1f} ms" for name in JOIN), None),
    ]


def row_of_account(printed):
    what, aim = "account: 1,000 nodes with four other pods each are held in Flux", "no aim"
    lines = [line for line in printed.splitlines() if "account after" in line or "followed" in line]
    return row(what, aim, "; ".join(lines), None) if lines else missing(what, aim, printed)


def image_binary():
    """The image's binary, if it was built since the last commit that concerns it."""
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    triple = subprocess.run(["rustc", "--print", "host-tuple"], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    binary = target / triple / "image" / "flux-distribute"
    sources = ["git", "log", "-1", "--format=%ct", "--", "crates", "src", "Cargo.toml", "Cargo.lock", ".cargo", "docker", "scripts/image-binary*"]
    changed = subprocess.run(sources, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    return binary if binary.exists() and binary.stat().st_mtime >= int(changed or 0) else None


def row_of_sizes():
    what, aim = "image; binary in it", "≤ 20 MiB; ≤ 19 MiB"
    if why := lacking("sizes"):
        return missing(what, aim, why)
    binary = image_binary()
    if not binary:
        return missing(what, aim, "`make image-binary` was not run since the last commit to the sources; run it first")
    with tempfile.TemporaryDirectory() as place:
        image = pathlib.Path(place) / "image.tar"
        if run("scripts/image.sh", image, BINARY=str(binary)) is None:
            return missing(what, aim, "scripts/image.sh failed")
        sizes = [file.stat().st_size / MEBI for file in (image, binary)]
    return row(what, aim, f"{sizes[0]:.1f} MiB; {sizes[1]:.1f} MiB", sizes[0] <= 20 and sizes[1] <= 19)


def versions():
    rustc = subprocess.run(["rustc", "--version"], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    server = pathlib.Path(ASSETS) / "kube-apiserver"
    api = subprocess.run([server, "--version"], stdout=subprocess.PIPE, text=True, check=True).stdout.strip() if server.exists() else "no kube-apiserver"
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False).stdout.strip()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30
    return {
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, {memory} GiB, Linux {platform.release()}",
        "versions": f"commit {commit}, {rustc}, {api}",
        "profile": PROFILE,
    }


def about(result):
    return f"{result['date']}; {result['machine']}; {result['versions']}; cargo profile `{result['profile']}`."


def table(result, apart):
    """apart: other results, of which only the counts are taken."""
    lines, counted = [about(result)], {one["nodes"]: one for one in result["counted"]}
    for each in apart:
        lacking_here = {one["nodes"]: one for one in each["counted"] if one["nodes"] not in counted}
        lines += ["", f"{' and '.join(f'{nodes:,}' for nodes in lacking_here)} nodes counted apart: {about(each)}"]
        counted |= lacking_here
    counted = [counted[nodes] for nodes in sorted(counted)]
    # Times of one build without optimisation keep all from being judged.
    profile = "dev" if "dev" in [each["profile"] for each in [result, *apart]] else result["profile"]
    rows = rows_of_counts(counted, profile) if counted else [missing("what an agent costs", "flat", result["not_counted"] or "the bench failed")]
    if counted and counted[-1]["nodes"] < 5000:
        nodes = " ".join(str(one["nodes"]) for one in counted)
        rows.append(missing("the same at 5,000 nodes", "the same", f"NODES was {nodes}; 5,000 need up to 20 GB, and more than half an hour"))
    lines += ["", "| what | aim | measured | |", "|---|---|---|---|"]
    lines += [f"| {one['what']} | {one['aim']} | {one['measured']} | {one['verdict']} |" for one in rows + result["other_rows"]]
    return "\n".join(lines)


def lacking(part, *needs):
    """Why a part can't run; None if it can. needs: of `flux`, `api`, `root`."""
    if part not in ONLY:
        return "ONLY left it out"
    if "api" in needs and not (pathlib.Path(ASSETS) / "kube-apiserver").exists():
        return "KUBEBUILDER_ASSETS names no kube-apiserver"
    if "flux" in needs and not (pathlib.Path(FLUX) / "bin" / "flux").exists():
        return "FLUX_PREFIX names no Flux"
    if "root" in needs and os.geteuid() != 0:
        return "local nodes need root"
    return None


def first_object(text):
    return (objects(text) or ["the bench failed"])[0]


def on_local_nodes(built, script, *arguments):
    """What a script prints that measures local nodes with a real Flux."""
    with tempfile.TemporaryDirectory() as place:
        bundle, binary = f"{place}/flux.tar.gz", built["flux-distribute"]
        if run(binary, "bundle", "create", "--from-prefix", FLUX, "--out", bundle) is None:
            return "no bundle could be made of FLUX_PREFIX"
        path = f"{os.environ['PATH']}:{ASSETS}"
        # What clusters run, if it is there.
        image = image_binary()
        agent = {"FLUX_DISTRIBUTE_LOCAL_AGENT": str(image)} if image else {}
        found = first_object(run(sys.executable, f"scripts/{script}", *arguments, BUNDLE=bundle, BINARY=binary, PATH=path, **agent))
        return found if isinstance(found, str) else {**found, "program": "the image's" if image else "a release build's"}


def end_early(*_):
    for process in list(RUNNING):
        process.terminate()
    sys.exit("terminated")


def measure():
    # Each agent has up to ten connections while it starts, and the API server as many: more than the usual 1,024 open files.
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    begin = time.monotonic()
    built = build()
    print(f"built after {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    begin, result = time.monotonic(), versions()
    result["not_counted"] = lacking("counts", "api")
    numbers = [] if result["not_counted"] else numbers_of_nodes()
    counting = lambda nodes: objects(run(built["counts"], os.environ.get("SECONDS_IDLE", "300"), nodes, seconds=1500 if nodes <= LARGEST else 7200))
    # The small numbers beside idle agents: all that is counted there, and nearly always waited for.
    with concurrent.futures.ThreadPoolExecutor() as pool:
        agent = lacking("agent", "flux", "root")
        idle = None if agent else pool.submit(on_local_nodes, built, "bench_agent.py", os.environ.get("SECONDS_AGENT", "180"))
        found = list(pool.map(counting, [nodes for nodes in numbers if nodes <= 100]))
        agent = agent or idle.result()
    found += [counting(nodes) for nodes in numbers if nodes > 100]
    result["counted"] = sorted((one for each in found for one in each), key=lambda one: one["nodes"])
    result["other_rows"] = rows_of_planner(lacking("planner", "api") or first_object(run(built["planner"], PLANNED)))
    result["other_rows"] += rows_of_agent(agent)
    result["other_rows"] += rows_of_waits(lacking("waits", "flux", "root") or on_local_nodes(built, "bench_waits.py", os.environ.get("TURNS", "6")))
    result["other_rows"] += rows_of_pure(lacking("pure") or first_object(run(built["pure"], "--bench")))
    result["other_rows"].append(row_of_account(lacking("account", "api", "flux") or run(built["account"], "1000", "4", seconds=600) or "the bench failed"))
    result["other_rows"].append(row_of_sizes())
    result["other_rows"] += rows_by_hand()
    result["seconds"] = round(time.monotonic() - begin)
    (ROOT / "target").mkdir(exist_ok=True)
    (ROOT / "target" / "bench.json").write_text(json.dumps(result, indent=1) + "\n")
    return result


def main():
    signal.signal(signal.SIGTERM, end_early)
    if sys.argv[1:2] == ["--of"]:
        result, *apart = [json.loads(pathlib.Path(file).read_text()) for file in sys.argv[2:]]
    else:
        result, apart = measure(), []
    text = table(result, apart)
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    PAGE.write_text(before + BEGIN + "\n" + text + "\n" + END + rest.split(END, 1)[1])
    print(text)


if __name__ == "__main__":
    main()
