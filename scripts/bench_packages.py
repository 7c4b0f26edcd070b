#!/usr/bin/env python3
"""Measures fetching and linking against what the machine can do at all, on the same bytes. See bench-packages.sh.

usage: bench_packages.py BENCH CHANNEL RUNS DIR...   (each DIR on a file system of its own to measure on)
"""

import functools
import http.server
import json
import os
import pathlib
import platform
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zipfile

PEER = """
import asyncio, os, sys, time
from rattler import install, LockFile, Platform
lock, prefix, cache = sys.argv[1:]
async def main():
    environment = LockFile.from_path(lock).default_environment()
    records = environment.conda_repodata_records_for_platform(environment.platforms()[0])
    start = time.monotonic()
    await install(records, prefix, cache_dir=cache, show_progress=False, execute_link_scripts=False)
    print(time.monotonic() - start)
    print(*(line for line in open("/proc/self/status") if line.startswith("VmHWM")), flush=True)
    # Its threads do not like the interpreter's end.
    os._exit(0)
asyncio.run(main())
"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass


def serve(directory):
    handler = functools.partial(Quiet, directory=directory)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


def run(command, **options):
    """Wall seconds, CPU seconds and peak MiB of a command, and what it said."""
    start = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)
    said = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    wall = time.monotonic() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        sys.exit(f"failed: {command}")
    # Its own word where it has one: the kernel's includes what this interpreter was before it became the command. Where
    # two processes work beside each other, both count.
    peaks = re.findall(r"VmHWM:\s*(\d+)", said)
    peak = sum(map(int, peaks)) if peaks else used.ru_maxrss
    return {"wall": wall, "cpu": used.ru_utime + used.ru_stime, "mib": peak / 1024, "said": said}


class Bench:
    def __init__(self, bench, channel, directory):
        self.bench, self.channel = bench, channel
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="bench-packages-", dir=directory))
        self.url = serve(channel)
        self.lock = str(self.directory / "lock.yaml")
        run([bench, "lock", self.url, self.lock])
        self.streams = self.split()
        self.on_disk = os.statvfs(directory).f_fsid != os.statvfs("/dev/shm").f_fsid

    def split(self):
        """The streams in the archives, as files: what zstd and bzip2 unpack without any of our work."""
        streams = self.directory / "streams"
        streams.mkdir()
        lines = []
        for archive in sorted(pathlib.Path(self.channel).glob("*/*.*")):
            stem = streams / archive.name
            if archive.suffix == ".conda":
                with zipfile.ZipFile(archive) as members:
                    stem.write_bytes(b"".join(members.read(n) for n in members.namelist() if n.endswith(".zst")))
                lines.append(f"zstd -dc {stem} | tar xi")
            elif archive.name.endswith(".tar.bz2"):
                shutil.copyfile(archive, stem)
                lines.append(f"bzip2 -dc {stem} | tar xi")
        # The biggest first, as we do.
        return sorted(lines, key=lambda line: -os.path.getsize(line.split()[2]))

    def discard(self, directory):
        """Out of the way of the next run. An ext4 without journal is slow to use again what was just deleted."""
        if not directory.exists():
            return
        if self.on_disk:
            directory.rename(pathlib.Path(tempfile.mkdtemp(dir=self.directory)) / "old")
        else:
            shutil.rmtree(directory)

    def fresh(self, name):
        directory = self.directory / name
        self.discard(directory)
        directory.mkdir()
        # So that no run is slowed by what the run before left unwritten.
        self.sync()
        return directory

    def sync(self):
        subprocess.run(["sync", "-f", self.directory], check=True)

    def durable(self, measure):
        """Ours ends with everything on the disk, so that of the others counts too."""
        start = time.monotonic()
        figures = measure()
        if self.on_disk:
            self.sync()
            figures["wall"] = time.monotonic() - start
        return figures

    def raw(self):
        into = self.fresh("raw")
        commands = "".join(f"mkdir {n} && cd {n} && {line} && cd ..\0" for n, line in enumerate(self.streams))
        each = ["xargs", "-0", "-n1", "-P2", "sh", "-c", 'eval "$0"']
        return self.durable(lambda: run_with_input(each, commands, into))

    def install(self):
        prefix = self.fresh("cold")
        return run([self.bench, "install", self.lock, str(prefix)])

    def link(self):
        prefix = self.directory / "cold"
        self.discard(prefix / "envs")
        self.sync()
        return run([self.bench, "link", self.lock, str(prefix)])

    def nothing(self, command):
        return run([self.bench, command, self.lock, str(self.directory / "cold")])

    def copy(self):
        into = self.fresh("copy")
        tree = next((self.directory / "cold/envs").iterdir())
        return self.durable(lambda: run(["cp", "-a", tree, into / "tree"]))

    def peer(self, python, fresh=True):
        where = self.fresh("peer") if fresh else self.directory / "peer"
        self.discard(where / "prefix")
        self.sync()

        def measure():
            figures = run([python, "-c", PEER, self.lock, str(where / "prefix"), str(where / "cache")])
            # Not its interpreter's start.
            figures["wall"] = float(figures["said"].split()[0])
            return figures

        start = measure()
        if self.on_disk:
            before = time.monotonic()
            self.sync()
            start["wall"] += time.monotonic() - before
        return start


def run_with_input(command, text, directory):
    with tempfile.TemporaryFile("w+") as file:
        file.write(text)
        file.seek(0)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        figures = run(command, stdin=file, cwd=directory)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    figures["cpu"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return figures


def rounds(bench, runs, python):
    """Interleaved, so that what else the machine does hits all alike."""
    steps = {"raw": bench.raw, "cold": bench.install, "peer": None, "copy": bench.copy, "warm": bench.link,
             "peer warm": None, "nothing: link": lambda: bench.nothing("link"),
             "nothing: fetch and link": lambda: bench.nothing("install")}
    if python:
        steps["peer"] = lambda: bench.peer(python)
        steps["peer warm"] = lambda: bench.peer(python, fresh=False)
    figures = {name: [] for name, step in steps.items() if step}
    for number in range(runs + 1):
        for name in figures:
            taken = steps[name]()
            # The first round only warms the page cache.
            if number:
                figures[name].append(taken)
    return figures


def report(figures):
    median = {name: {key: statistics.median(one[key] for one in taken) for key in ("wall", "cpu", "mib")}
              for name, taken in figures.items()}
    peak = {name: max(one["mib"] for one in taken) for name, taken in figures.items()}
    against = {"cold": "raw", "peer": "raw", "warm": "copy", "peer warm": "copy"}
    print("| step | wall s | CPU s | peak MiB | ratio |\n|---|---|---|---|---|")
    for name, one in median.items():
        other = against.get(name)
        ratio = f"{one['wall'] / median[other]['wall']:.2f} x {other}" if other else ""
        if name == "cold" and "peer" in median:
            ratio += f", {one['wall'] / median['peer']['wall']:.2f} x peer"
        print(f"| {name} | {one['wall']:.3f} | {one['cpu']:.2f} | {peak[name]:.0f} | {ratio} |")


def main():
    bench, channel, runs, directories = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:]
    peer = os.environ.get("PY_RATTLER")
    size = json.loads(pathlib.Path(channel, "size.json").read_text())
    distribution = re.search('PRETTY_NAME="(.*)"', pathlib.Path("/etc/os-release").read_text())[1]
    print(f"{os.cpu_count()} cores, {distribution}, Linux {platform.release()}; {size}; medians of {runs} runs")
    for directory in directories:
        kind = subprocess.run(["stat", "-f", "-c", "%T", directory], stdout=subprocess.PIPE, text=True, check=True)
        print(f"\nOn {kind.stdout.strip()}:")
        one = Bench(bench, channel, directory)
        try:
            report(rounds(one, runs, peer))
        finally:
            shutil.rmtree(one.directory, ignore_errors=True)


if __name__ == "__main__":
    main()
