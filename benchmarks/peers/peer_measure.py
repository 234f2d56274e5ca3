"""What the peers share, as measure.h for the benchmarks: their command line, ranks, times and memory."""

import argparse
import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def parse_options(description, ranks=0, rounds=15, add_options=None):
    """--rounds, --ranks where there is a default, and what `add_options(parser)` adds. One thread from here on."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=rounds, help="rounds of which the fastest counts")
    if ranks:
        parser.add_argument("--ranks", type=int, default=ranks)
    if add_options:
        add_options(parser)
    torch.set_num_threads(1)
    return parser.parse_args()


def _run_rank(rank, measure, ranks, folder, results, arguments):
    torch.set_num_threads(1)
    # Meshes ask for it, as under torchrun.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    result = measure(*arguments)
    dist.barrier()
    if rank == 0:
        results.put(result)
    dist.destroy_process_group()


def launch_ranks(measure, ranks, *arguments):
    """What measure(*arguments) returns on rank 0 of `ranks` processes over gloo; a function of the main module."""
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_run_rank, args=(measure, ranks, folder, results, arguments), nprocs=ranks)
    return results.get()


def microseconds(calls, rounds, steps=20, clock=time.perf_counter):
    """Of each call: the fastest of `rounds` rounds of `steps` calls, which take turns; a first one is not counted."""
    best = [float("inf")] * len(calls)
    for turn in range(-1, rounds):
        for i, call in enumerate(calls):
            start = clock()
            for _ in range(steps):
                call()
            if turn >= 0:
                best[i] = min(best[i], (clock() - start) / steps * 1e6)
    return best


def peak_bytes():
    """The most bytes that this process had in memory since the last reset_peak()."""
    with open("/proc/self/status", encoding="utf-8") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:")) * 1024


def reset_peak():
    """Returns what the process has in memory now."""
    with open("/proc/self/clear_refs", "w", encoding="utf-8") as file:
        file.write("5")
    return peak_bytes()


def print_results(results):
    for name, value in results.items():
        print(name, value, flush=True)
