"""The all_reduce of gloo_all_reduce.cpp in PyTorch: prints "name value" lines."""

import time

import torch
import torch.distributed as dist
from peer_measure import launch_ranks, parse_options, print_results

KIBIBYTES = (4, 16, 64, 256, 1024, 4096, 16384, 65536)


def measure(rounds):
    results = {}
    for kibibytes in KIBIBYTES:
        tensor = torch.zeros(kibibytes * 256)
        calls = min(max((64 << 10) // kibibytes, 2), 200)
        best = float("inf")
        for turn in range(-1, rounds):
            dist.barrier()
            start = time.perf_counter()
            for _ in range(calls):
                dist.all_reduce(tensor)
            if turn >= 0:
                best = min(best, (time.perf_counter() - start) / calls * 1e6)
        results[f"{kibibytes:05}KiB_us"] = best
    return results


if __name__ == "__main__":
    options = parse_options(__doc__, ranks=2)
    print_results(launch_ranks(measure, options.ranks, options.rounds))
