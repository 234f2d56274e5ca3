#!/usr/bin/env python3
"""Checks a trace of tools/merge_traces: check_trace.py FILE RANKS NAME...

Ranges nest on each thread, spans begin and end, a collective has the same flow id on all its ranks, and no all-gather
ends on a rank before every rank issued it. Each rank must have an event whose name contains NAME.
"""

import collections
import json
import sys

ROUNDING_US = 0.0021


def check_nesting(events):
    threads = collections.defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0 and event["ts"] > -1e6, event
            threads[event["pid"], event["tid"]].append(event)
    for ranges in threads.values():
        open_ranges = []
        for event in sorted(ranges, key=lambda event: (event["ts"], -event["dur"])):
            while open_ranges and open_ranges[-1]["ts"] + open_ranges[-1]["dur"] <= event["ts"] + ROUNDING_US:
                open_ranges.pop()
            if open_ranges:
                end = open_ranges[-1]["ts"] + open_ranges[-1]["dur"]
                assert event["ts"] + event["dur"] <= end + ROUNDING_US, (open_ranges[-1], event)
            open_ranges.append(event)
    return len(threads)


def check_spans(events):
    begun = collections.Counter()
    for event in events:
        if event["ph"] in "be":
            begun[event["pid"], event["cat"], event["id2"]["local"]] += 1 if event["ph"] == "b" else -1
    assert not any(begun.values()), "a span without end"
    return len(begun)


def check_flows(events):
    flows = collections.defaultdict(list)
    issues = collections.defaultdict(dict)
    for event in events:
        if event["ph"] in "stf":
            flows[event["id"]].append(event)
        elif event["ph"] == "X" and event["args"].get("part") == "issue" and "flow" in event["args"]:
            issues[event["args"]["flow"]][event["pid"]] = event
    complete = {key: ranks for key, ranks in issues.items() if len(ranks) == next(iter(ranks.values()))["args"]["ranks"]}
    assert complete, "no collective on all its ranks"
    keys = [flow[0]["args"]["flow"] for flow in flows.values()]
    assert len(set(keys)) == len(keys) and set(complete) <= set(keys), "each collective has one flow"
    for flow in flows.values():
        ranks = issues[flow[0]["args"]["flow"]]
        assert {event["pid"] for event in flow} == set(ranks), flow
        assert [event["ph"] for event in flow].count("s") == [event["ph"] for event in flow].count("f") == 1
        kinds = {event["name"] for event in ranks.values()}
        assert len(kinds) == 1, kinds
        for event in flow:
            issue = ranks[event["pid"]]
            assert issue["ts"] <= event["ts"] <= issue["ts"] + issue["dur"] and event["tid"] == issue["tid"]
    return complete


def check_clock(events, complete, error_us):
    """A rank has the result of an all-gather when every rank has given its part."""
    checked = 0
    for event in events:
        args = event.get("args", {})
        if event["ph"] == "X" and args.get("part") == "wait" and event["name"] == "wait all_gather":
            issues = complete.get(args["flow"], {})
            for issue in issues.values():
                assert event["ts"] + event["dur"] >= issue["ts"] - error_us, (event, issue)
                checked += 1
    assert checked, "no all_gather"


def main(path, ranks, *names):
    with open(path, encoding="utf-8") as file:
        trace = json.load(file)
    events = trace["traceEvents"]
    threads = check_nesting(events)
    spans = check_spans(events)
    complete = check_flows(events)
    check_clock(events, complete, error_us=20 + max(trace["tessera"]["clock_error_ns"].values()) / 1000)
    for rank in range(int(ranks)):
        own = [event.get("name", "") for event in events if event["pid"] == rank]
        for name in names:
            assert any(name in event for event in own), f"rank {rank} has no event '{name}': {sorted(set(own))}"
    print(f"{len(events)} events on {threads} threads, {spans} spans, {len(complete)} collectives")


if __name__ == "__main__":
    main(*sys.argv[1:])
