"""What gpu_step.cpp measures over the fake backend, in PyTorch, as one rank on one GPU: prints "name value" lines.

With --ranks 1 its compute_ms is the peer of that of gpu_step --ranks 1: ranks that are threads share the GPU otherwise.
"""

import time

import torch
import torch.distributed as dist
from fully_shard_step_peer import BYTE_VALUES, Gpt
from peer_measure import microseconds, parse_options, print_results
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

FEW_TOKENS = 32  # so that the host never waits for room in a queue of kernels


def add_options(parser):
    for name, value in [("dim", 1024), ("layers", 8), ("heads", 16), ("context", 512), ("batch", 8), ("steps", 10)]:
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", default="cuda")


def make_step(own, is_sharded, batch, context):
    model = Gpt(own.dim, own.layers, own.heads, context).to(own.device)
    if is_sharded:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        mesh = dist.init_device_mesh(own.device, (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    else:
        model.to(torch.bfloat16)
    data = torch.randint(BYTE_VALUES, (batch, context + 1)).to(own.device)
    inputs, targets = data[:, :-1], data[:, 1:].reshape(-1)

    def step():
        model.zero_grad()
        F.cross_entropy(model(inputs).view(-1, BYTE_VALUES).float(), targets).backward()

    return step


def wait_for_gpu(own):
    if own.device == "cuda":
        torch.cuda.synchronize()


def gpu_ms(own, step):
    def steps():
        for _ in range(own.steps):
            step()
        wait_for_gpu(own)

    return microseconds([steps], own.rounds, steps=1)[0] / own.steps / 1e3


def host_us(own, step):
    with torch.autograd.set_multithreading_enabled(False):
        calls = [lambda: wait_for_gpu(own), step]
        return microseconds(calls, own.rounds, steps=1, clock=time.thread_time)[1]


def measure(own):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=own.ranks)
    sharded, plain = (make_step(own, is_sharded, own.batch, own.context) for is_sharded in (True, False))
    few = [make_step(own, is_sharded, 1, min(own.context, FEW_TOKENS)) for is_sharded in (True, False)]
    results = {
        "gpu_step/ranks": own.ranks,
        "gpu_step/compute_ms": gpu_ms(own, sharded),
        "gpu_step/plain_ms": gpu_ms(own, plain),
        "gpu_step/host_us_per_unit": (host_us(own, few[0]) - host_us(own, few[1])) / own.layers,
    }
    dist.destroy_process_group()
    return results


if __name__ == "__main__":
    print_results(measure(parse_options(__doc__, ranks=2, rounds=5, add_options=add_options)))
