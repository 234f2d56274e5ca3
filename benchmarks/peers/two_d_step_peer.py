"""The measurements of two_d_step.cpp in PyTorch: prints "name value" lines."""

import torch
from peer_measure import launch_ranks, microseconds, parse_options, print_results
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

DIM, ROWS = 64, 8


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
        **{f"{i}.in_proj": ColwiseParallel() for i in range(3)},
        **{f"{i}.out_proj": RowwiseParallel(use_local_output=False) for i in range(2)},
        "2.out_proj": RowwiseParallel(),
    }
    parallelize_module(stack, tp, plan)


def shard(stack, dp):
    for child in stack:
        fully_shard(child, mesh=dp)
    fully_shard(stack, mesh=dp)


def step_ms(stack, rounds):
    optimizer = torch.optim.Adam(stack.parameters(), lr=1e-2)
    data = torch.randn(ROWS, DIM)

    def step():
        stack.zero_grad()
        stack(data).sum().backward()
        optimizer.step()

    return microseconds([step], rounds)[0] / 1e3


def two_d_step_ms(rounds):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    stack = make_stack()
    parallelize(stack, mesh["tp"])
    shard(stack, mesh["dp"])
    return step_ms(stack, rounds)


if __name__ == "__main__":
    options = parse_options(__doc__)
    two_d = launch_ranks(two_d_step_ms, 4, options.rounds)
    # Between processes PyTorch has gloo alone.
    print_results(
        {
            "two_d/shm_step_ms": two_d,
            "two_d/gloo_step_ms": two_d,
            "plain/step_ms": step_ms(make_stack(), options.rounds),
        }
    )
