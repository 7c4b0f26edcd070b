#!/usr/bin/env python3
"""Prints the licences of every crate that is linked into the binary: names first, then the texts, each once.

usage: licenses.py TARGET_TRIPLE
"""
import json
import pathlib
import subprocess
import sys

NAMES = ("licen", "copying", "notice", "copyright", "unlicense")


def texts(package):
    """The licence files that the crate brings along."""
    folder = pathlib.Path(package["manifest_path"]).parent
    files = (file for file in sorted(folder.iterdir()) if file.is_file() and file.name.lower().startswith(NAMES))
    return [file.read_text(errors="replace").strip() for file in files]


command = ["cargo", "metadata", "--locked", "--no-default-features", "--format-version=1", f"--filter-platform={sys.argv[1]}"]
metadata = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
packages = {package["id"]: package for package in metadata["packages"]}
nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}

# What is built for tests or runs at build time is in no binary.
root = metadata["resolve"]["root"]
linked, queue = set(), [root]
while queue:
    node = queue.pop()
    if node in linked or any("proc-macro" in target["kind"] for target in packages[node]["targets"]):
        continue
    linked.add(node)
    queue += [dep["pkg"] for dep in nodes[node]["deps"] if any(kind["kind"] is None for kind in dep["dep_kinds"])]
# Our own.
linked = {node for node in linked if packages[node]["source"]}

found = sorted((packages[node] for node in linked), key=lambda package: (package["name"], package["version"]))
print("Crates that are linked into flux-distribute, and their licences.\n")
holders = {}
for package in found:
    name = f"{package['name']} {package['version']}"
    print(f"{name}: {package['license'] or package['license_file']} ({package['repository'] or 'crates.io'})")
    for text in texts(package):
        # Many copies differ in how their lines are broken, and in nothing else.
        holders.setdefault(" ".join(text.split()), (text, []))[1].append(name)
for text, names in holders.values():
    print(f"\n{'=' * 100}\n{', '.join(names)}\n{'-' * 100}\n{text}")
