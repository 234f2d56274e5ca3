#!/usr/bin/env python3
"""Kills ranks of train_gpt, and prints how long it takes to the next step: recovery_time.py PROGRAM KILLS OPTION...

  tests/chaos/recovery_time.py bazel-bin/examples/train_gpt 100 --save-every 50 --in-memory-every 1

A rank gets SIGKILL 0.5 to 1.5 s after the step that came after the kill before. The next step is the first one that
train_gpt logs after that.
"""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

SEED = 1


def ranks_of(launcher):
    """The processes that it has started."""
    found = []
    for status in pathlib.Path("/proc").glob("[0-9]*/status"):
        try:
            if f"PPid:\t{launcher}\n" in status.read_text():
                found.append(int(status.parent.name))
        except OSError:
            pass  # it has ended
    return found


def read_steps(log):
    """(time, step) of each whole line, in their order."""
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    return [(line["time"], line["step"]) for line in map(json.loads, (l for l in lines if l.endswith("\n")))]


def await_step(log, after):
    while True:
        for when, step in read_steps(log):
            if when > after:
                return when, step
        time.sleep(0.02)


def percentile(values, share):
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main():
    program, kills, options = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    draw = random.Random(SEED)
    seconds, lost = [], []
    with tempfile.TemporaryDirectory() as work:
        log = pathlib.Path(work, "log", "metrics.jsonl")
        run = subprocess.Popen(
            [program, "--steps", "1000000", "--eval-every", "1000000", "--svg", f"{work}/curve.svg", "--checkpoint-dir",
             f"{work}/run", "--max-restarts", "1000000", "--log-dir", log.parent, "--log-every", "1", *options],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        await_step(log, 0)
        for _ in range(kills):
            time.sleep(draw.uniform(0.5, 1.5))
            victim = draw.choice(ranks_of(run.pid))
            killed = time.time()
            os.kill(victim, signal.SIGKILL)
            ended = killed + 0.1  # until then, others may go on
            when, step = await_step(log, ended)
            made = [own for time_of, own in read_steps(log) if time_of <= ended][-1]
            seconds.append(when - killed)
            lost.append(made + 1 - step)
        run.terminate()
        run.wait()
    print(f"{kills} kills: {percentile(seconds, 0.5):.2f} s to the next step (median), {percentile(seconds, 0.99):.2f} s "
          f"(p99), {max(seconds):.2f} s (longest); steps made again: {percentile(lost, 0.5)} (median), {max(lost)} (most)")


main()
