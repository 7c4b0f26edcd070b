#!/usr/bin/env python3
"""Makes a conda channel to measure with: always the same bytes, as much and as mixed as an instance's package set.

usage: bench_channel.py DIR

66 packages for this machine's platform, some 310 MB and 7,400 files when unpacked: few large binaries and many small
text files, prefixes of both kinds, symlinks, noarch packages with entry points, .tar.bz2 among .conda. Needs Debian's
python3 and zstd.
"""

import bz2
import hashlib
import io
import json
import os
import platform
import random
import subprocess
import sys
import tarfile
import zipfile

PLATFORM = {"x86_64": "linux-64", "aarch64": "linux-aarch64"}[platform.machine()]
# As long as conda-build's: the place for the real prefix in a binary.
PLACEHOLDER = "/opt/" + "placehold_" * 25
TIME = 1_700_000_000
WORDS = ["self", "return", "import", "value", "node", "rank", "state", "broker", "schedule", "match", "error", "config",
         "static", "const", "struct", "handle", "message", "reply", "topic", "future", "yield", "graph", "vertex", "edge"]


class Package:
    def __init__(self, name, seed, version="1.0.0", noarch=False, depends=(), old=False):
        self.name, self.version, self.noarch, self.depends, self.old = name, version, noarch, list(depends), old
        self.random = random.Random(seed)
        self.files, self.paths, self.entry_points = [], [], []

    def add(self, path, data, mode=0o644, prefix=None):
        self.files.append((path, data, mode, None))
        entry = {"_path": path, "path_type": "hardlink", "sha256": hashlib.sha256(data).hexdigest(),
                 "size_in_bytes": len(data)}
        if prefix:
            entry |= {"prefix_placeholder": PLACEHOLDER, "file_mode": prefix}
        self.paths.append(entry)

    def link(self, path, target):
        self.files.append((path, b"", 0o777, target))
        self.paths.append({"_path": path, "path_type": "softlink", "sha256": hashlib.sha256(b"").hexdigest(),
                           "size_in_bytes": 0})

    def text(self, size, prefix=False):
        """Text that packs about as source does."""
        out, have = ["#!/bin/sh\nprefix=" + PLACEHOLDER + "\n" if prefix else "# part of the measurement\n"], 0
        while have < size:
            line = " ".join(self.random.choices(WORDS, k=8)) + f" = {self.random.getrandbits(40):x}\n"
            out.append(line)
            have += len(line)
        return "".join(out).encode()[:size]

    def binary(self, size, prefix=False):
        """Bytes that pack about as machine code does: a third is new, the rest was there before."""
        out = bytearray(b"\x7fELF\x02\x01\x01\0")
        while len(out) < size:
            out += self.random.randbytes(340)
            at = self.random.randrange(max(1, len(out) - 60_000))
            out += out[at:at + 660]
        if prefix:
            for _ in range(3):
                at = self.random.randrange(size - 600)
                out[at:at + 300] = (PLACEHOLDER + "/lib").encode().ljust(300, b"\0")
        return bytes(out[:size])

    def tar(self, files):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for path, data, mode, target in files:
                entry = tarfile.TarInfo(path)
                entry.mtime, entry.mode = TIME, mode
                if target is None:
                    entry.size = len(data)
                    tar.addfile(entry, io.BytesIO(data))
                else:
                    entry.type, entry.linkname = tarfile.SYMTYPE, target
                    tar.addfile(entry)
        return buffer.getvalue()

    def write(self, channel):
        subdir = "noarch" if self.noarch else PLATFORM
        stem = f"{self.name}-{self.version}-0"
        index = {"name": self.name, "version": self.version, "build": "0", "build_number": 0, "depends": self.depends,
                 "subdir": subdir, "timestamp": TIME * 1000}
        index |= {"noarch": "python"} if self.noarch else {"platform": "linux"}
        info = {"info/index.json": index, "info/paths.json": {"paths": self.paths, "paths_version": 1},
                "info/about.json": {"summary": "for measuring"}}
        if self.noarch:
            info["info/link.json"] = {"noarch": {"type": "python", "entry_points": self.entry_points},
                                      "package_metadata_version": 1}
        info = [(path, json.dumps(text).encode(), 0o644, None) for path, text in info.items()]
        if self.old:
            name, packed = f"{stem}.tar.bz2", bz2.compress(self.tar(info + self.files))
        else:
            name, zipped = f"{stem}.conda", io.BytesIO()
            with zipfile.ZipFile(zipped, "w", zipfile.ZIP_STORED) as archive:
                parts = {"metadata.json": b'{"conda_pkg_format_version": 2}'}
                parts[f"pkg-{stem}.tar.zst"] = zstd(self.tar(self.files))
                parts[f"info-{stem}.tar.zst"] = zstd(self.tar(info))
                for part, data in parts.items():
                    archive.writestr(zipfile.ZipInfo(part, (1980, 1, 1, 0, 0, 0)), data)
            packed = zipped.getvalue()
        with open(f"{channel}/{subdir}/{name}", "wb") as file:
            file.write(packed)
        return subdir, name, index | {"sha256": hashlib.sha256(packed).hexdigest(),
                                      "md5": hashlib.md5(packed).hexdigest(), "size": len(packed)}


def zstd(data):
    # conda-forge's level.
    return subprocess.run(["zstd", "-q", "-c", "-16"], input=data, stdout=subprocess.PIPE, check=True).stdout


def packages():
    python = Package("python", 1, version="3.12.4")
    python.add("bin/python3.12", python.binary(6_000_000, prefix=True), 0o755, "binary")
    python.link("bin/python3", "python3.12")
    python.link("bin/python", "python3.12")
    for n in range(1800):
        python.add(f"lib/python3.12/part{n % 60}/module{n}.py", python.text(python.random.randrange(800, 30_000)))
    yield python

    # Few files, most of the bytes: compilers' runtimes, MPI, hwloc and the like.
    libraries = []
    for n in range(34):
        library = Package(f"library{n}", 100 + n, old=n % 9 == 4)
        size = 700_000 if library.old else (24_000_000 if n < 4 else 4_900_000)
        prefix = n % 3 == 0
        library.add(f"lib/liblibrary{n}.so.1.0", library.binary(size, prefix), 0o755, "binary" if prefix else None)
        library.link(f"lib/liblibrary{n}.so.1", f"liblibrary{n}.so.1.0")
        library.link(f"lib/liblibrary{n}.so", f"liblibrary{n}.so.1")
        for m in range(28):
            library.add(f"include/library{n}/part{m}.h", library.text(library.random.randrange(500, 12_000)))
        library.add(f"lib/pkgconfig/library{n}.pc", library.text(600, prefix=True), 0o644, "text")
        libraries.append(library)
    libraries[0].link("etc/localtime", "/etc/localtime")

    tools = []
    for n in range(24):
        tool = Package(f"tool{n}", 200 + n)
        tool.add(f"bin/tool{n}", tool.binary(900_000, prefix=True), 0o755, "binary")
        tool.add(f"bin/tool{n}-config", tool.text(3_000, prefix=True), 0o755, "text")
        for m in range(155):
            tool.add(f"share/tool{n}/{m % 7}/page{m}.txt", tool.text(tool.random.randrange(300, 9_000)))
        tools.append(tool)

    pure = []
    for n in range(6):
        one = Package(f"pure{n}", 300 + n, noarch=True, depends=["python"])
        for m in range(90):
            one.add(f"site-packages/pure{n}/module{m}.py", one.text(one.random.randrange(500, 15_000)))
        one.entry_points = [f"pure{n} = pure{n}.module0:main"]
        pure.append(one)
    yield from libraries + tools + pure

    flux = Package("flux-core", 2, depends=[p.name for p in [python, *libraries, *tools, *pure]])
    # What bench-peers.sh takes for a broker that starts.
    flux.add("bin/flux", b"#!/bin/sh\nexec sleep 1000000\n", 0o755)
    flux.add("lib/libflux-core.so", flux.binary(400_000, prefix=True), 0o755, "binary")
    flux.add("etc/flux.conf", flux.text(2_000, prefix=True), 0o644, "text")
    yield flux


def main():
    channel = sys.argv[1]
    index = {subdir: {} for subdir in (PLATFORM, "noarch")}
    for subdir in index:
        os.makedirs(f"{channel}/{subdir}", exist_ok=True)
    count, files, unpacked, packed = 0, 0, 0, 0
    for package in packages():
        subdir, name, record = package.write(channel)
        index[subdir][name] = record
        count, files, packed = count + 1, files + len(package.files), packed + record["size"]
        unpacked += sum(len(file[1]) for file in package.files)
    for subdir, records in index.items():
        old = {name: record for name, record in records.items() if name.endswith(".bz2")}
        new = {name: record for name, record in records.items() if name.endswith(".conda")}
        with open(f"{channel}/{subdir}/repodata.json", "w") as file:
            json.dump({"info": {"subdir": subdir}, "packages": old, "packages.conda": new}, file)
    with open(f"{channel}/size.json", "w") as file:
        json.dump({"packages": count, "files": files, "unpacked": unpacked, "packed": packed}, file)


if __name__ == "__main__":
    main()
