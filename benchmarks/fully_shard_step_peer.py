"""The measurements of fully_shard_step.cpp in PyTorch: prints "name value" lines."""

import os
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

DIM, BLOCKS, LAYERS = 16, 16, 6
ROUNDS, STEPS = 15, 20


def make_model():
    return nn.Sequential(
        *(nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(LAYERS))) for _ in range(BLOCKS))
    )


def shard(model):
    for block in model:
        fully_shard(block)
    fully_shard(model)


def microseconds(calls, clock=time.perf_counter):
    best = [float("inf")] * len(calls)
    for turn in range(-1, ROUNDS):
        for i, call in enumerate(calls):
            start = clock()
            for _ in range(STEPS):
                call()
            if turn >= 0:
                best[i] = min(best[i], (clock() - start) / STEPS * 1e6)
    return best


def make_step(model, optimizer=None):
    data = torch.randn(4, DIM)

    def step():
        model.zero_grad()
        model(data).sum().backward()
        if optimizer is not None:
            optimizer.step()

    return step


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def host_us_per_unit():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    plain, sharded = make_model(), make_model()
    shard(sharded)
    times = microseconds([make_step(plain), make_step(sharded)], time.thread_time)
    dist.destroy_process_group()
    return (times[1] - times[0]) / BLOCKS


def run_gloo_rank(rank, results):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29512")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model = make_model()
    shard(model)
    result = microseconds([make_step(model, adamw(model))])[0] / 1e3
    if rank == 0:
        results.put(result)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    queue = mp.get_context("spawn").SimpleQueue()
    mp.spawn(run_gloo_rank, args=(queue,), nprocs=2)
    print("fully_shard/gloo_step_ms", queue.get())
    print("fully_shard/host_us_per_unit", host_us_per_unit())
    model = make_model()
    print("plain/step_ms", microseconds([make_step(model, adamw(model))])[0] / 1e3)
