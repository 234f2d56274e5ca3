"""Counts what passed and failed in a CI run: count_tests.py EVENTS_JSON tests=EXIT_STATUS NAME=EXIT_STATUS...

EVENTS_JSON is the file of `bazel test --build_event_json_file`; tests= has that command's exit status, each NAME is a
check of its own. Prints what failed, then "N passed, N failed"; exits with 1 unless all passed. A test target
without a result (not built, skipped by a failure) has failed; so has a test command that fails or runs no test.
"""

import json
import sys


def test_results(events_file):
    """{label: passed} of all test targets that the build knew."""
    results = {}
    with open(events_file, encoding="utf-8") as events:
        for event in map(json.loads, events):
            identity = event["id"]
            if "targetConfigured" in identity and "testSize" in event.get("configured", {}):
                results.setdefault(identity["targetConfigured"]["label"], False)
            elif "testSummary" in identity:
                results[identity["testSummary"]["label"]] = event["testSummary"]["overallStatus"] == "PASSED"
    return results


def main(events_file, *checks):
    try:
        results = test_results(events_file)
    except FileNotFoundError:
        results = {}
    statuses = {name: int(status) for name, _, status in (check.partition("=") for check in checks)}
    test_status = statuses.pop("tests")
    failed = [label for label, passed in sorted(results.items()) if not passed]
    if not results:
        failed.append("no test ran")
    if test_status != 0 and not failed:
        failed.append(f"a target that is no test did not build: the test command's exit status is {test_status}")
    failed += [f"{name}: exit status {status}" for name, status in statuses.items() if status != 0]
    passed = sum(results.values()) + sum(status == 0 for status in statuses.values())
    for what in failed:
        print("FAILED:", what)
    print(f"{passed} passed, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
