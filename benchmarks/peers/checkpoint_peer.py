"""PyTorch's distributed checkpoint on the bytes of checkpoint.cpp: prints "name value" lines, GB/s."""

import os
import shutil
import tempfile
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from peer_measure import launch_ranks, parse_options, print_results
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

RANKS, TENSORS, ROWS, COLUMNS = 2, 32, 1024, 1024


def best(rounds, prepare, step):
    fastest = float("inf")
    for _ in range(rounds):
        prepare()
        dist.barrier()
        start = time.perf_counter()
        step()
        dist.barrier()
        fastest = min(fastest, time.perf_counter() - start)
    return fastest


def drop_from_page_cache(folder):
    for parent, _, names in os.walk(folder):
        for name in names:
            descriptor = os.open(os.path.join(parent, name), os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def measure(folder, rounds):
    mesh = init_device_mesh("cpu", (RANKS,))
    state = {
        f"layers.{i}.weight": distribute_tensor(torch.ones(ROWS, COLUMNS), mesh, [Shard(0)]) for i in range(TENSORS)
    }
    path = os.path.join(folder, "saved")

    def on_rank_0(prepare):
        dist.barrier()
        if dist.get_rank() == 0:
            prepare()

    gigabytes = 4 * TENSORS * ROWS * COLUMNS / 1e9
    save = best(
        rounds,
        lambda: on_rank_0(lambda: shutil.rmtree(path, ignore_errors=True)),
        lambda: dcp.save(state, checkpoint_id=path),
    )
    load = best(
        rounds, lambda: on_rank_0(lambda: drop_from_page_cache(path)), lambda: dcp.load(state, checkpoint_id=path)
    )
    return {"save": gigabytes / save, "load": gigabytes / load}


if __name__ == "__main__":
    options = parse_options(__doc__, rounds=5)
    with tempfile.TemporaryDirectory() as parent:
        print_results(launch_ranks(measure, RANKS, parent, options.rounds))
