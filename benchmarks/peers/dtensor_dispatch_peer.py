"""The measurements of dtensor_dispatch.cpp in PyTorch: prints "name microseconds" lines."""

import os

import torch
import torch.distributed as dist
from peer_measure import microseconds, parse_options, print_results
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

CALLS = 2000  # a round


def main():
    options = parse_options(__doc__, rounds=5)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    mesh = init_device_mesh("cpu", (1,))
    a = distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)])
    b = distribute_tensor(torch.zeros(8, 8), mesh, [Shard(0)])
    weight = distribute_tensor(torch.ones(8, 8), mesh, [Replicate()])
    calls = {
        "add": lambda: torch.add(a, b),
        "add_": lambda: a.add_(b),
        "mm": lambda: torch.mm(a, weight),
        "t": lambda: a.t(),
        "view": lambda: a.view(64),
        "sum": lambda: a.sum(),
        "linear": lambda: torch.nn.functional.linear(a, weight),
        "redistribute to the same": lambda: a.redistribute(mesh, [Shard(0)]),
    }
    with torch.no_grad():
        print_results({name: microseconds([call], options.rounds, CALLS)[0] for name, call in calls.items()})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
