#!/usr/bin/env python3
"""Checks that packages depend on each other one way: tools/check_layering.py [--graph]

A package is a folder, a component a header with its source, and an #include of another package's header an edge. A header
that only includes another one, under a public name, is neither. Fails on packages that include each other, on a package
of more than 15 components, and on a folder of more than 30 files. --graph prints each package with its size and what it
uses.
"""

import collections
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
OTHER_FOLDERS = {"tests", "third_party", "tools", "install", "docs"}
MOST_COMPONENTS = 15
MOST_FILES = 30
FORWARDING = re.compile(r'#pragma once\n(//.*\n)*\n?#include "[^"]+"  // IWYU pragma: export\n')



def read_graph():
    """(components by package, includes by package and used package, as "file -> header")"""
    listed = subprocess.check_output(["git", "-C", ROOT, "ls-files", "*.h", "*.cpp", "*.cu"], text=True).split()
    files = [file for file in listed if file.split("/")[0] not in OTHER_FOLDERS]
    components = collections.defaultdict(set)
    uses = collections.defaultdict(lambda: collections.defaultdict(list))
    for file in files:
        package = file.rpartition("/")[0]
        text = (ROOT / file).read_text(encoding="utf-8")
        if FORWARDING.fullmatch(text):
            continue
        components[package].add(file.rpartition(".")[0])
        for header in re.findall(r'^#include "([^"]+)"', text, re.MULTILINE):
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


def count_files():
    """How many files each folder has, tests and tools too."""
    listed = subprocess.check_output(["git", "-C", ROOT, "ls-files"], text=True).split()
    return collections.Counter(file.rpartition("/")[0] for file in listed)


def check(components, uses):
    """What is wrong, a text each."""
    for knot in find_cycles(sorted(components), uses):
        edges = [include for one in sorted(knot) for other in sorted(knot) for include in uses[one].get(other, [])]
        yield f"packages include each other: {' '.join(sorted(knot))}\n  " + "\n  ".join(edges)
    for package, parts in sorted(components.items()):
        if len(parts) > MOST_COMPONENTS:
            yield f"{package} has {len(parts)} components, {MOST_COMPONENTS} are allowed: make a package of some of them"
    for folder, number in sorted(count_files().items()):
        if number > MOST_FILES:
            yield f"{folder} has {number} files, {MOST_FILES} are allowed: make a folder of some of them"


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
