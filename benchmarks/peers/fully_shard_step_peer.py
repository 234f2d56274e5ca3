"""The measurements of fully_shard_step.cpp, and with --memory of memory.cpp, in PyTorch: prints "name value" lines."""

import time

import torch
import torch.distributed as dist
from peer_measure import launch_ranks, microseconds, parse_options, peak_bytes, print_results, reset_peak
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

BYTE_VALUES = 256
TINY_DIM, TINY_BLOCKS, TINY_LAYERS = 16, 16, 6
# dim, layers, heads, context, batch, steps a round
GPT_SIZES = {"256": (256, 4, 4, 128, 4, 4), "768": (768, 8, 12, 64, 1, 2)}
MIB = 1 << 20


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.attention_out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp_in, self.mlp_out = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def attend(self, x):
        batch, length, dim = x.shape
        q, k, v = self.qkv(x).view(batch, length, self.heads, 3, dim // self.heads).permute(3, 0, 2, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.attention_out(attended.transpose(1, 2).reshape(batch, length, dim))

    def forward(self, x):
        x = x + self.attend(self.attention_norm(x))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x)), approximate="tanh"))


class Gpt(nn.Module):
    """examples/gpt_model.h."""

    def __init__(self, dim, layers, heads, context):
        super().__init__()
        self.token_embedding, self.position_embedding = nn.Embedding(BYTE_VALUES, dim), nn.Embedding(context, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.output = nn.Linear(dim, BYTE_VALUES, bias=False)

    def forward(self, tokens):
        x = self.token_embedding(tokens) + self.position_embedding(torch.arange(tokens.size(1), device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.output(self.norm(x))


def make_model(size):
    """The model, its blocks, its loss as a function, and the steps of a round."""
    if size == "tiny":
        model = nn.Sequential(
            *(nn.Sequential(*(nn.Linear(TINY_DIM, TINY_DIM) for _ in range(TINY_LAYERS))) for _ in range(TINY_BLOCKS))
        )
        rows = torch.randn(4, TINY_DIM)
        return model, list(model), lambda: model(rows).sum(), 20
    dim, layers, heads, context, batch, steps = GPT_SIZES[size]
    model = Gpt(dim, layers, heads, context)
    data = torch.randint(BYTE_VALUES, (batch, context + 1))
    inputs, targets = data[:, :-1], data[:, 1:].reshape(-1)
    return model, list(model.blocks), lambda: F.cross_entropy(model(inputs).view(-1, BYTE_VALUES), targets), steps


def shard(model, blocks):
    for block in blocks:
        fully_shard(block)
    fully_shard(model)


def make_step(model, loss, optimizes):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True) if optimizes else None

    def step():
        model.zero_grad()
        loss().backward()
        if optimizer is not None:
            optimizer.step()

    return step


def step_ms(size, rounds, is_sharded):
    model, blocks, loss, steps = make_model(size)
    if is_sharded:
        shard(model, blocks)
    return microseconds([make_step(model, loss, True)], rounds, steps)[0] / 1e3


def peak_mib(size, is_sharded):
    start = reset_peak()
    model, blocks, loss, _ = make_model(size)
    if is_sharded:
        shard(model, blocks)
    step = make_step(model, loss, True)
    for _ in range(3):
        step()
    peak = torch.tensor(float(peak_bytes() - start))
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return peak.item() / MIB


def host_us_per_unit(rounds):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    calls = []
    for is_sharded in (False, True):
        model, blocks, loss, _ = make_model("tiny")
        if is_sharded:
            shard(model, blocks)
        calls.append(make_step(model, loss, False))
    plain, sharded = microseconds(calls, 20 * rounds, steps=5, clock=time.thread_time)
    dist.destroy_process_group()
    return (sharded - plain) / TINY_BLOCKS


def measure_steps(size, ranks, rounds):
    # Between processes PyTorch has gloo alone.
    step = launch_ranks(step_ms, ranks, size, rounds, True)
    results = {
        "fully_shard/shm_step_ms": step,
        "fully_shard/gloo_step_ms": step,
        "plain/step_ms": step_ms(size, rounds, False),
    }
    if size == "tiny":
        results["fully_shard/host_us_per_unit"] = host_us_per_unit(rounds)
    return results


def measure_memory(size, ranks):
    return {
        "fully_shard/peak_mib": launch_ranks(peak_mib, ranks, size, True),
        "plain/peak_mib": launch_ranks(peak_mib, 1, size, False),
    }


def add_options(parser):
    parser.add_argument("--size", choices=["tiny", *GPT_SIZES], default="tiny")
    parser.add_argument("--memory", action="store_true", help="the most memory of a step in place of its time")


if __name__ == "__main__":
    options = parse_options(__doc__, ranks=2, add_options=add_options)
    if options.memory:
        print_results(measure_memory(options.size, options.ranks))
    else:
        print_results(measure_steps(options.size, options.ranks, options.rounds))
