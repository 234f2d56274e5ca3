"""PyTorch's distributed checkpoint on the bytes of checkpoint.cpp: prints "name value" lines, GB/s."""

import os
import shutil
import tempfile
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

RANKS, TENSORS, ROWS, COLUMNS, ROUNDS = 2, 32, 1024, 1024, 5


def best(prepare, step):
    fastest = float("inf")
    for _ in range(ROUNDS):
        prepare()
        dist.barrier()
        start = time.perf_counter()
        step()
        dist.barrier()
        fastest = min(fastest, time.perf_counter() - start)
    return fastest


def run(rank, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29611", RANK=str(rank), WORLD_SIZE=str(RANKS))
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (RANKS,))
    state = {
        f"layers.{i}.weight": distribute_tensor(torch.ones(ROWS, COLUMNS), mesh, [Shard(0)]) for i in range(TENSORS)
    }
    path = os.path.join(folder, "saved")

    def remove():
        dist.barrier()
        if rank == 0:
            shutil.rmtree(path, ignore_errors=True)

    gigabytes = 4 * TENSORS * ROWS * COLUMNS / 1e9
    save = best(remove, lambda: dcp.save(state, checkpoint_id=path))
    load = best(lambda: None, lambda: dcp.load(state, checkpoint_id=path))
    if rank == 0:
        print(f"save {gigabytes / save}\nload {gigabytes / load}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    folder = tempfile.mkdtemp(dir=os.environ.get("TMPDIR", "/tmp"))
    try:
        mp.spawn(run, args=(folder,), nprocs=RANKS)
    finally:
        shutil.rmtree(folder)
