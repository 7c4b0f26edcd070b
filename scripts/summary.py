#!/usr/bin/env python3
"""What a run of `cargo test` has shown, from all that it printed: what ran, what ended early and for what need, what failed.

    summary.py LOG [--status CODE] [--kind passed|failed|REASON]

CODE is the exit code of cargo; --kind says that the test on a kind cluster belongs to the run, and how it ended. The last line is
"N passed, N failed, N skipped". A test that ended early (tests/support/needs.rs) is skipped, whatever cargo calls it.
"""

import argparse
import re
from collections import Counter

ANSI = re.compile(r"\x1b\[[0-9;]*m")
# A test may print beside another one's line, so a skip need not stand at its beginning.
SKIP = re.compile(r"skipped: (\w+)::(\S+): needs ([a-z0-9-]+): (.*)")
PROGRAM = re.compile(r"^ +Running .*\((?:.*/)?(\w+)-[0-9a-f]+\)$")
DOCUMENTATION = re.compile(r"^ +Doc-tests (\w+)$")
RESULT = re.compile(r"test result: \w+\. (\d+) passed; (\d+) failed; (\d+) ignored; \d+ measured; \d+ filtered out")
END_TO_END = "local_flux"


class Program:
    """One test program, up to now."""

    def __init__(self, name):
        self.name = name
        self.counts = None
        self.failed = []
        self.listed = []


def read(lines):
    """All programs, and the skips: (program, test) to (need, reason).

    A test may run its own program once more, which prints a result too: of each program the last one counts.
    """
    programs, skips = [], {}
    for line in lines:
        line = ANSI.sub("", line).rstrip("\n")
        if found := PROGRAM.search(line) or DOCUMENTATION.search(line):
            name = found[1] if PROGRAM.search(line) else f"documentation of {found[1]}"
            programs.append(Program(name))
        elif found := SKIP.search(line):
            skips[found[1], found[2]] = (found[3], found[4])
        elif programs:
            program = programs[-1]
            if line == "failures:":
                program.listed = []
            elif line.startswith("    ") and not line.startswith("     "):
                program.listed.append(line.strip())
            elif found := RESULT.search(line):
                program.counts = [int(count) for count in found.groups()]
                # The names stand right before the result.
                program.failed = program.listed[-program.counts[1]:] if program.counts[1] else []
                program.listed = []
    return programs, skips


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("log")
    arguments.add_argument("--status", type=int, default=0)
    arguments.add_argument("--kind")
    arguments = arguments.parse_args()
    with open(arguments.log, errors="replace") as log:
        programs, skips = read(log)

    ended = [program for program in programs if program.counts]
    failed = [f"{program.name}: {test}" for program in programs for test in program.failed]
    failed += [f"{program.name}: it ended without a result" for program in programs if not program.counts]
    if arguments.status and not failed:
        failed.append(f"cargo test: it ended with {arguments.status}, see above")
    # What was skipped in part, and failed then, has failed.
    early = {key: skip for key, skip in skips.items() if "{}: {}".format(*key) not in failed}
    passed = sum(program.counts[0] for program in ended) - len(early)
    skipped = len(early)
    needs = Counter(early.values())

    print("\n== tests ==")
    print(f"ran: {len(ended)} test programs; {passed + skipped} tests ended well, {skipped} of them early")
    if ignored := sum(program.counts[2] for program in ended):
        print(f"ignored: {ignored}, which other tests run in processes of their own")
    for (need, reason), count in sorted(needs.items()):
        print(f"skipped: {count} {'test needs' if count == 1 else 'tests need'} {need}: {reason}")
    if arguments.kind:
        outcomes = {"passed": (1, [], 0), "failed": (0, ["kind: scripts/kind-test.sh"], 0)}
        more = outcomes.get(arguments.kind, (0, [], 1))
        passed, failed, skipped = passed + more[0], failed + more[1], skipped + more[2]
        if more[2]:
            total = sum(program.counts[0] for program in ended if program.name == END_TO_END)
            left = sum(program == END_TO_END for program, _ in early)
            local = f"{total - left} of {total} end-to-end tests passed in local mode"
            print(f"skipped: the test on a kind cluster: {arguments.kind}; {local}")
        else:
            print(f"kind: the test on a kind cluster {arguments.kind}")
    for name in failed:
        print(f"FAILED: {name}")
    print(f"{passed} passed, {len(failed)} failed, {skipped} skipped")


if __name__ == "__main__":
    main()
