#!/usr/bin/env python3
"""Checks that packages depend on each other one way: tools/check_layering.py [--graph]

A package is a folder, a component a header with its source, and an #include of another package's header an edge. Fails on
packages that include each other, and on a package with more than 15 components. KNOWN_CYCLES and KNOWN_LARGE list what
there is of both today; they may only shrink, and an entry that is no longer needed is an error too. --graph prints each
package with its size and what it uses.
"""

import collections
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
OTHER_FOLDERS = {"tests", "third_party", "tools", "install", "docs"}
MOST_COMPONENTS = 15
KNOWN_CYCLES = [{"dtensor", "dtensor/ops"}]
# Package → how many components it has at most.
KNOWN_LARGE = {
    "checkpoint": 27,
    "comm": 59,
    "dtensor": 48,
    "dtensor/ops": 35,
    "examples": 26,
    "fully_shard": 77,
    "nn": 25,
    "testing": 27,
}


def read_graph():
    """(components by package, includes by package and used package, as "file -> header")"""
    listed = subprocess.check_output(["git", "-C", ROOT, "ls-files", "*.h", "*.cpp", "*.cu"], text=True).split()
    files = [file for file in listed if file.split("/")[0] not in OTHER_FOLDERS]
    components = collections.defaultdict(set)
    uses = collections.defaultdict(lambda: collections.defaultdict(list))
    for file in files:
        package = file.rpartition("/")[0]
        components[package].add(file.rpartition(".")[0])
        for header in re.findall(r'^#include "([^"]+)"', (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE):
            used = header.rpartition("/")[0]
            if header in files and used != package:
                uses[package][used].append(f"{file} -> {header}")
    return components, uses


def find_cycles(packages, uses):
    """Sets of packages that reach each other."""

    def reached_from(package):
        seen, left = set(), [package]
        while left:
            for used in uses.get(left.pop(), {}):
                if used not in seen:
                    seen.add(used)
                    left.append(used)
        return seen

    reached = {package: reached_from(package) for package in packages}
    cycles = []
    for package in packages:
        knot = {other for other in reached[package] if package in reached[other]}
        if knot and knot not in cycles:
            cycles.append(knot)
    return cycles


def check(components, uses):
    """What is wrong, a text each."""
    cycles = find_cycles(sorted(components), uses)
    for knot in cycles:
        if knot not in KNOWN_CYCLES:
            edges = [include for one in sorted(knot) for other in sorted(knot) for include in uses[one].get(other, [])]
            yield f"packages include each other: {' '.join(sorted(knot))}\n  " + "\n  ".join(edges)
    for knot in KNOWN_CYCLES:
        if knot not in cycles:
            yield f"these no longer include each other, take them out of KNOWN_CYCLES: {' '.join(sorted(knot))}"
    for package, parts in sorted(components.items()):
        most = KNOWN_LARGE.get(package, MOST_COMPONENTS)
        if len(parts) > most:
            yield f"{package} has {len(parts)} components, {most} are allowed: make a package of some of them"
        elif package in KNOWN_LARGE and len(parts) < most:
            yield f"{package} has {len(parts)} components: lower its number in KNOWN_LARGE"


def main(arguments):
    components, uses = read_graph()
    if arguments == ["--graph"]:
        for package, parts in sorted(components.items()):
            print(f"{package:24s} {len(parts):3d} components  uses {' '.join(sorted(uses[package]))}")
    elif arguments:
        sys.exit("usage: tools/check_layering.py [--graph]")
    faults = list(check(components, uses))
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
