"""Peer of tools/gpu_check's train_large in PyTorch, as one rank on one GPU: prints "name value" lines.

floor_ms is the time of the model's matrix products and attention alone, each at its own shape: no step that uses these
kernels can be faster. eager and compiled are steps of FSDP2, the latter with each block compiled.
"""

import time

import torch
import torch.distributed as dist
from fully_shard_step_peer import BYTE_VALUES, Gpt
from peer_measure import parse_options, print_results
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

WARM_UP = 3


def add_options(parser):
    for name, value in [("dim", 2048), ("layers", 24), ("heads", 16), ("context", 1024), ("batch", 8)]:
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--accumulate", type=int, default=1, help="passes per step, each over --batch samples")
    parser.add_argument("--device", default="cuda")


def wait_for_gpu(own):
    if own.device == "cuda":
        torch.cuda.synchronize()


def milliseconds(own, call):
    """The median time of --rounds calls."""
    times = []
    for turn in range(WARM_UP + own.rounds):
        wait_for_gpu(own)
        start = time.perf_counter()
        call()
        wait_for_gpu(own)
        if turn >= WARM_UP:
            times.append((time.perf_counter() - start) * 1e3)
    return sorted(times)[len(times) // 2]


def floor_ms(own):
    """Of a pass, in bfloat16."""
    made = {"device": own.device, "dtype": torch.bfloat16}
    tokens, dim = own.batch * own.context, own.dim
    layers = [(dim, 3 * dim), (dim, dim), (dim, 4 * dim), (4 * dim, dim)]
    products = [(rows, columns, own.layers) for rows, columns in layers] + [(dim, BYTE_VALUES, 1)]
    total = 0
    for inputs, outputs, count in products:
        x, weight = torch.randn(tokens, inputs, **made), torch.randn(outputs, inputs, **made)
        gradient = torch.randn(tokens, outputs, **made)
        for product in (lambda: x @ weight.t(), lambda: gradient @ weight, lambda: gradient.t() @ x):
            total += count * milliseconds(own, product)
    sizes = (own.batch, own.heads, own.context, dim // own.heads)
    q, k, v = (torch.randn(sizes, **made, requires_grad=True) for _ in range(3))
    gradient = torch.randn(sizes, **made)

    def attend():
        F.scaled_dot_product_attention(q, k, v, is_causal=True).backward(gradient)

    return total + own.layers * milliseconds(own, attend)


def make_step(own, is_compiled):
    torch.manual_seed(0)
    model = Gpt(own.dim, own.layers, own.heads, own.context).to(own.device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = dist.init_device_mesh(own.device, (1,))
    for block in model.blocks:
        if is_compiled:
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    data = torch.randint(BYTE_VALUES, (own.batch, own.context + 1)).to(own.device)
    inputs, targets = data[:, :-1].contiguous(), data[:, 1:].reshape(-1)

    def step():
        optimizer.zero_grad()
        for each in range(own.accumulate):
            is_last = each + 1 == own.accumulate
            model.set_requires_gradient_sync(is_last)
            model.set_reshard_after_backward(is_last)
            loss = F.cross_entropy(model(inputs).view(-1, BYTE_VALUES).float(), targets) / own.accumulate
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def measure(own):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    results = {"train_large/floor_ms": own.accumulate * floor_ms(own)}
    for name in ("eager", "compiled"):
        if own.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        ms = milliseconds(own, make_step(own, name == "compiled"))
        results[f"train_large/{name}_ms"] = ms
        results[f"train_large/{name}_tokens_per_second"] = own.accumulate * own.batch * own.context / ms * 1e3
        if own.device == "cuda":
            results[f"train_large/{name}_peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
    dist.destroy_process_group()
    return results


if __name__ == "__main__":
    print_results(measure(parse_options(__doc__, rounds=10, add_options=add_options)))
