#!/usr/bin/env python3
"""Checks a snapshot of a memory timeline: check_memory.py FOLDER RANKS CATEGORY...

Each rank's pickle has what PyTorch's memory_viz reads. Blocks do not overlap while they are alive; the most that is alive
is what the text says; what is alive at the end is in the segments. Each rank has blocks of each CATEGORY.
"""

import bisect
import pickle
import re
import sys


def check_trace(trace, segments):
    """Returns the most bytes that are alive."""
    alive, places, total, most, categories = {}, [], 0, 0, set()
    for event in trace:
        if event["action"] == "alloc":
            place = bisect.bisect(places, event["addr"])
            assert place == 0 or places[place - 1] + alive[places[place - 1]] <= event["addr"], event
            assert place == len(places) or event["addr"] + event["size"] <= places[place], event
            places.insert(place, event["addr"])
            alive[event["addr"]] = event["size"]
            categories.add(event["frames"][0]["filename"])
        else:
            assert alive.pop(event["addr"]) == event["size"], event
            places.remove(event["addr"])
        total += event["size"] if event["action"] == "alloc" else -event["size"]
        most = max(most, total)
    assert sorted((segment["address"], segment["total_size"]) for segment in segments) == sorted(alive.items())
    return most, categories


def main(folder, ranks, *categories):
    for rank in range(int(ranks)):
        with open(f"{folder}/memory-rank-{rank}.pickle", "rb") as file:
            snapshot = pickle.load(file)
        most, found = check_trace(*snapshot["device_traces"], snapshot["segments"])
        assert set(categories) <= found, found
        with open(f"{folder}/memory-rank-{rank}.txt", encoding="utf-8") as file:
            text = file.read()
        match = re.match(rf"rank {rank}: at most (\d+) bytes are alive, in step (\d+)\n", text)
        assert match and int(match[1]) == most, (text, most)
        rows = [int(size) for size in re.findall(r"^ *(\d+) +\d+  ", text.split("\nfrom the end")[0], re.MULTILINE)]
        assert sum(rows) == most and rows == sorted(rows, reverse=True), text
        print(f"rank {rank}: {len(snapshot['device_traces'][0])} events, at most {most} bytes, in step {match[2]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
