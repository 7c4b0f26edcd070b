#!/usr/bin/env python3
"""Prints the licences of every crate that is linked into the binary: names first, then the texts, each once.

usage: licenses.py TARGET_TRIPLE…
       licenses.py --sbom TARGET_TRIPLE…                the same crates as a bill of materials (CycloneDX 1.6)
       licenses.py [--sbom] --plugin TARGET_TRIPLE…     of kubectl-flux, instead of the image's program
"""
import argparse
import json
import pathlib
import subprocess
import sys

NAMES = ("licen", "copying", "notice", "copyright", "unlicense")


def linked(manifest, triples):
    """The program of that Cargo.toml, and the crates that are linked into it for any of these targets."""
    platforms = [f"--filter-platform={triple}" for triple in triples]
    command = ["cargo", "metadata", "--locked", "--no-default-features", "--format-version=1", "--manifest-path", manifest, *platforms]
    metadata = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    packages = {package["id"]: package for package in metadata["packages"]}
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}

    # What is built for tests or runs at build time is in no binary.
    root = metadata["resolve"]["root"]
    found, queue = set(), [root]
    while queue:
        node = queue.pop()
        if node in found or any("proc-macro" in target["kind"] for target in packages[node]["targets"]):
            continue
        found.add(node)
        queue += [dep["pkg"] for dep in nodes[node]["deps"] if any(kind["kind"] is None for kind in dep["dep_kinds"])]
    # Without our own.
    crates = (packages[node] for node in found if packages[node]["source"])
    return packages[root], sorted(crates, key=lambda package: (package["name"], package["version"]))


def texts(package):
    """The licence files that the crate brings along."""
    folder = pathlib.Path(package["manifest_path"]).parent
    files = (file for file in sorted(folder.iterdir()) if file.is_file() and file.name.lower().startswith(NAMES))
    return [file.read_text(errors="replace").strip() for file in files]


def print_licences(program, crates):
    print(f"Crates that are linked into {program}, and their licences.\n")
    holders = {}
    for package in crates:
        name = f"{package['name']} {package['version']}"
        print(f"{name}: {package['license'] or package['license_file']} ({package['repository'] or 'crates.io'})")
        for text in texts(package):
            # Many copies differ in how their lines are broken, and in nothing else.
            holders.setdefault(" ".join(text.split()), (text, []))[1].append(name)
    for text, names in holders.values():
        print(f"\n{'=' * 100}\n{', '.join(names)}\n{'-' * 100}\n{text}")


def component(package, kind):
    url = f"pkg:cargo/{package['name']}@{package['version']}"
    described = {"type": kind, "bom-ref": url, "name": package["name"], "version": package["version"]}
    # Ours is in no registry.
    if package["source"]:
        described["purl"] = url
    if package["license"]:
        # Old crates write `/` for `OR`.
        described["licenses"] = [{"expression": " OR ".join(part.strip() for part in package["license"].split("/"))}]
    return described


def print_sbom(program, crates):
    """Without a time or a number of its own: the same crates give the same text."""
    document = {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1}
    document["metadata"] = {"component": component(program, "application")}
    document["components"] = [component(package, "library") for package in crates]
    json.dump(document, sys.stdout, indent=1)
    print()


parser = argparse.ArgumentParser()
parser.add_argument("--sbom", action="store_true")
parser.add_argument("--plugin", action="store_true")
parser.add_argument("triples", nargs="+")
arguments = parser.parse_args()
program, crates = linked("crates/kubectl/Cargo.toml" if arguments.plugin else "Cargo.toml", arguments.triples)
name = "kubectl-flux" if arguments.plugin else program["name"]
if arguments.sbom:
    print_sbom(program | {"name": name}, crates)
else:
    print_licences(name, crates)
