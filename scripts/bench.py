#!/usr/bin/env python3
"""Measures what docs/measured.md says about scale, and writes it there: JSON in target/bench.json, and a Markdown table.

    make bench                  or scripts/bench.py

NODES="10 100 1000": numbers of nodes; the default depends on this machine's memory. SECONDS_IDLE=300: how long to count once all are online; each watch
begins anew within 290 s.
BENCH_PROFILE=dev: build without optimisation. Counts hold then, and times are not judged.
"""

import datetime
import json
import os
import pathlib
import platform
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "measured.md"
BEGIN, END = "<!-- make bench writes from here -->", "<!-- to here -->"
PROFILE = os.environ.get("BENCH_PROFILE", "bench")
ASSETS = os.environ.get("KUBEBUILDER_ASSETS", "")
FLUX = os.environ.get("FLUX_PREFIX", "/opt/flux")
FLAT = 1.3
# An agent of this bench takes 3 MiB, and the API server nearly as much for it. One that is a member also keeps each rank of the roster.
MEBIBYTES_PER_AGENT = 6
BYTES_PER_RANK = 700


def available_mebibytes():
    for line in pathlib.Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) // 1024
    return 0


def numbers_of_nodes():
    if "NODES" in os.environ:
        return [int(number) for number in os.environ["NODES"].split()]
    fits = lambda n: n * (MEBIBYTES_PER_AGENT + n * BYTES_PER_RANK / (1 << 20)) < available_mebibytes() / 2
    return [n for n in (10, 100, 1000, 5000) if fits(n)]


def bench(name, *arguments, seconds=1500):
    """What a bench prints; None if it fails."""
    command = ["cargo", "bench", "--locked", "--profile", PROFILE, "--bench", name, "--", *arguments]
    print("$", " ".join(command), file=sys.stderr)
    try:
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return None
    return done.stdout if done.returncode == 0 else None


def objects(text):
    return [json.loads(line) for line in (text or "").splitlines() if line.startswith("{")]


def criterion(name):
    """The median in milliseconds."""
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    file = target / "criterion" / name / "new" / "estimates.json"
    return json.loads(file.read_text())["median"]["point_estimate"] / 1e6 if file.exists() else None


def row(what, aim, measured, is_met):
    verdict = {True: "met", False: "not met", None: "not judged"}[is_met]
    return {"what": what, "aim": aim, "measured": measured, "verdict": verdict}


def missing(what, aim, why):
    return row(what, aim, f"not run: {why}", None)


def timed(is_met):
    return is_met if PROFILE != "dev" else None


def flat(counted, what, aim, of, form="{:.0f}"):
    values = [of(one) for one in counted]
    numbers = ", ".join(f"{one['nodes']:,}: {form.format(value)}" for one, value in zip(counted, values))
    ratio = max(values) / values[0] if values[0] else float(max(values) > 0)
    return row(what, aim, f"{numbers} ({ratio:.2f} ×)", ratio <= FLAT)


def rows_of_counts(counted):
    def of_start(name):
        return lambda one: one["start"]["plain"][name]

    def per_minute(name):
        return lambda one: one["steady"]["plain"][name] * 60 / one["steady_secs"]

    def bytes_of_all(one):
        start = one["start"]["plain"]
        return start["bytes_of_roster"] + start["bytes_of_broker_toml"]

    def other_bytes(one):
        start = one["start"]["plain"]
        return start["bytes"] - bytes_of_all(one) - start["bytes_of_instance"]

    within = f"flat within {FLAT} ×"
    last = counted[-1]
    idle = per_minute("requests")
    storm = last["failover"]["plain"]["requests"]
    return [
        flat(counted, "cold start: requests of an agent", within, of_start("requests"), "{:.1f}"),
        flat(counted, "cold start: rounds of an agent", within, of_start("rounds"), "{:.1f}"),
        flat(counted, "cold start: bytes to an agent, but for the next two rows", within, other_bytes),
        flat(counted, "cold start: bytes of roster and broker.toml to an agent, which name all ranks", within, bytes_of_all),
        flat(counted, "cold start: bytes of the FluxInstance to an agent", within, lambda one: one["start"]["plain"]["bytes_of_instance"]),
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
            timed(last["join_secs"] <= 0.2),
        ),
        row(
            f"failover of the planner among {last['nodes']:,}, and requests of an agent meanwhile",
            "≤ 20 s, < 1",
            f"{last['failover_secs']:.1f} s, {storm:.2f}",
            last["failover_secs"] <= 20 and storm < 1,
        ),
        row("memory of an agent in this bench, all in one process", "no aim: not that of a pod", ", ".join(f"{one['nodes']:,}: {one['bytes_of_memory_per_agent'] / (1 << 20):.1f} MiB" for one in counted), None),
    ]


def rows_of_pure(sizes):
    render, write, read = (criterion(name) for name in ("render", "write_roster", "read_roster"))
    if not sizes or render is None:
        return [missing("broker.toml for 10,000 nodes in 20 kinds", "≤ 50 ms", "the bench failed")]
    sizes = sizes[0]
    kilobytes = lambda name: f"{sizes[name] / 1000:.0f} kB"
    return [
        row(
            "broker.toml for 10,000 nodes in 20 kinds: rendered, size, packed",
            "≤ 50 ms",
            f"{render:.1f} ms, {kilobytes('broker_toml_bytes')}, {kilobytes('broker_toml_packed')}",
            timed(render <= 50),
        ),
        row(
            "roster of 5,000: written and packed, read, size, packed",
            "no aim",
            f"{write:.1f} ms, {read:.1f} ms, {kilobytes('roster_bytes')}, {kilobytes('roster_packed')}",
            None,
        ),
    ]


def row_of_account():
    what, aim = "account: 1,000 nodes with four other pods each are held in Flux", "no aim"
    if not (pathlib.Path(FLUX) / "bin" / "flux").exists() or not ASSETS:
        return missing(what, aim, "it needs Flux (FLUX_PREFIX) and an API server (KUBEBUILDER_ASSETS)")
    if PROFILE == "dev":
        return missing(what, aim, "built without optimisation")
    printed = bench("account", "1000", "4", seconds=600)
    lines = [line for line in (printed or "").splitlines() if "account after" in line or "followed" in line]
    return row(what, aim, "; ".join(lines), None) if lines else missing(what, aim, "the bench failed")


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


def table(result):
    about = f"{result['date']}; {result['machine']}; {result['versions']}; cargo profile `{result['profile']}`."
    lines = [about, "", "| what | aim | measured | |", "|---|---|---|---|"]
    lines += [f"| {one['what']} | {one['aim']} | {one['measured']} | {one['verdict']} |" for one in result["rows"]]
    return "\n".join(lines)


def main():
    result = versions()
    counted = []
    if (pathlib.Path(ASSETS) / "kube-apiserver").exists():
        for nodes in numbers_of_nodes():
            found = objects(bench("counts", os.environ.get("SECONDS_IDLE", "300"), str(nodes)))
            if not found:
                print(f"the counts of {nodes} nodes failed", file=sys.stderr)
                break
            counted += found
    rows = rows_of_counts(counted) if counted else [missing("what an agent costs", "flat", "KUBEBUILDER_ASSETS names no kube-apiserver")]
    if counted and counted[-1]["nodes"] < 5000:
        rows.append(missing("the same at 5,000 nodes", "the same", "this machine is too small, or NODES names no such number"))
    rows += rows_of_pure(objects(bench("pure")))
    rows.append(row_of_account())
    rows.append(missing("planner's memory at 5,000", "≤ 200 MB", "planner and agents share a process in this bench"))
    rows.append(missing("an idle agent: RSS, threads, share of a core", "≤ 15 MiB, ≤ 6, ≤ 0.1 %", "it needs the pod of a node"))
    result["counted"], result["rows"] = counted, rows
    (ROOT / "target").mkdir(exist_ok=True)
    (ROOT / "target" / "bench.json").write_text(json.dumps(result, indent=1) + "\n")
    text = table(result)
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    PAGE.write_text(before + BEGIN + "\n" + text + "\n" + END + rest.split(END, 1)[1])
    print(text)


if __name__ == "__main__":
    main()
