"""The measurements of two_d_step.cpp in PyTorch: prints "name value" lines."""

import os
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

DIM, ROWS = 64, 8
ROUNDS, STEPS = 15, 20


class Mlp(nn.Module):
    def __init__(self, multiplier):
        super().__init__()
        self.in_proj = nn.Linear(DIM, multiplier * DIM)
        self.out_proj = nn.Linear(multiplier * DIM, DIM)

    def forward(self, x):
        return self.out_proj(self.in_proj(x).relu()).relu()


def make_stack():
    return nn.Sequential(Mlp(3), Mlp(4), Mlp(3))


def parallelize(stack, tp):
    plan = {
        **{f"{i}.in_proj": ColwiseParallel(use_local_output=False) for i in range(3)},
        **{f"{i}.out_proj": RowwiseParallel(use_local_output=False) for i in range(2)},
        "2.out_proj": RowwiseParallel(),
    }
    parallelize_module(stack, tp, plan)


def shard(stack, dp):
    for child in stack:
        fully_shard(child, mesh=dp)
    fully_shard(stack, mesh=dp)


def milliseconds(stack):
    optimizer = torch.optim.Adam(stack.parameters(), lr=1e-2)
    data = torch.randn(ROWS, DIM)
    best = float("inf")
    for turn in range(-1, ROUNDS):
        start = time.perf_counter()
        for _ in range(STEPS):
            stack.zero_grad()
            stack(data).sum().backward()
            optimizer.step()
        if turn >= 0:
            best = min(best, (time.perf_counter() - start) / STEPS * 1e3)
    return best


def run_rank(rank, results):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29513")
    dist.init_process_group("gloo", rank=rank, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    stack = make_stack()
    parallelize(stack, mesh["tp"])
    shard(stack, mesh["dp"])
    result = milliseconds(stack)
    if rank == 0:
        results.put(result)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    queue = mp.get_context("spawn").SimpleQueue()
    mp.spawn(run_rank, args=(queue,), nprocs=4)
    print("two_d/gloo_step_ms", queue.get())
    print("plain/step_ms", milliseconds(make_stack()))
