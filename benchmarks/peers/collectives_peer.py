"""The collectives of collectives.cpp in PyTorch over gloo: prints "name value" lines."""

import time

import torch
import torch.distributed as dist
from peer_measure import launch_ranks, parse_options, print_results

SIZES = {"4KiB": 4 << 10, "64KiB": 64 << 10, "1MiB": 1 << 20, "16MiB": 16 << 20}


def call_us(call, size, rounds):
    calls = 4 if size > 1000000 else 200
    best = float("inf")
    for turn in range(-1, rounds):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        if turn >= 0:
            best = min(best, (time.perf_counter() - start) / calls * 1e6)
    return best


def measure(rounds):
    results = {}
    ranks = dist.get_world_size()
    for name, size in SIZES.items():
        count = size // 4
        whole, part, everything = torch.zeros(count), torch.zeros(count // ranks), torch.zeros(ranks * count)
        evenly = whole[: part.numel() * ranks]
        cast, all_cast = whole.bfloat16(), everything.bfloat16()

        def gather_cast():
            cast.copy_(whole)
            dist.all_gather_into_tensor(all_cast, cast)

        times = {
            "all_gather": call_us(lambda: dist.all_gather_into_tensor(everything, whole), size, rounds),
            "all_gather_bf16": call_us(gather_cast, size, rounds),
            "reduce_scatter": call_us(lambda: dist.reduce_scatter_tensor(part, evenly), size, rounds),
            "all_reduce": call_us(lambda: dist.all_reduce(whole), size, rounds),
        }
        for collective, value in times.items():
            # Between processes PyTorch has gloo alone.
            results[f"{collective}/{name}/gloo_us"] = results[f"{collective}/{name}/shm_us"] = value
    return results


if __name__ == "__main__":
    options = parse_options(__doc__, ranks=2)
    print_results(launch_ranks(measure, options.ranks, options.rounds))
