"""What //benchmarks:all runs, and what it is to reach."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Benchmark:
    name: str
    program: str
    what: str
    arguments: tuple = ()
    # Of the program, in each round of the suite; 0: it takes no --rounds.
    rounds: int = 5


@dataclass(frozen=True)
class Goal:
    benchmark: str
    line: str
    limit: float
    what: str
    # Of ours / PyTorch; otherwise of our own value.
    of_peer: bool = False
    at_least: bool = False
    # The benchmark's line of the same work with plain copies and sums in place of the library's, in the same round.
    floor: str = ""


_MODELS = {
    "tiny": "16 blocks of 6 Linear(16, 16), where overhead is all there is",
    "256": "GPT of dim 256 and 4 layers, 4 x 128 bytes a rank",
    "768": "GPT of dim 768 and 8 layers (218 MiB), 1 x 64 bytes a rank",
}


def _step(size, rounds):
    return Benchmark(
        name=f"fully_shard_step_{size}",
        program="fully_shard_step",
        what=f"A training step under `fully_shard` on 2 ranks, {_MODELS[size]}, with fused AdamW. PyTorch's peer of "
        "shm and gloo is FSDP2 over gloo; plain is the model in one process, without communication. shm_over_ideal is "
        "the step over shm divided by one process's forward and backward plus half of its optimizer; shm_over_floor "
        "divides by the same of two processes that train side by side and meet after each step, since they share "
        "caches and memory, and no step is faster than its slowest rank, plus floor/communication_ms: the step's "
        "collectives as copies and sums of data that lies in shared memory already. That sum is floor/step_ms.",
        arguments=("--size", size, "--ranks", "2"),
        rounds=rounds,
    )


def _step_of_ranks(size, ranks):
    return Benchmark(
        name=f"fully_shard_step_{size}_ranks_{ranks}",
        program="fully_shard_step",
        what=f"The same on {'1 rank, which has all' if ranks == 1 else f'{ranks} ranks'}: {_MODELS[size]}. With more "
        "ranks than cores, lines that divide by one process's step divide by one that has a core to itself.",
        arguments=("--size", size, "--ranks", str(ranks)),
        rounds=2,
    )


BENCHMARKS = (
    Benchmark(
        "dtensor_dispatch",
        "dtensor_dispatch",
        "An op on DTensors of 8 x 8 floats on a mesh of one rank, where dispatch is all there is; plain is the op on "
        "plain tensors.",
    ),
    Benchmark(
        "collectives",
        "collectives",
        "A collective of 2 ranks and its wait. Sizes are of a rank's input for all_gather, of the whole tensor for the "
        "others. PyTorch's peer of shm and gloo is gloo. Lent is shm where the inputs lie in shared memory, as the "
        "flat shards of `fully_shard` do, so that peers read them there. The floor is data that lies in shared memory "
        "already, two barriers, and a sum or a copy, plain or past the cache as is faster; streamed is the copy past the "
        "cache. all_gather_bf16 gives bfloat16 of float32: cast before it is sent or, lent, by the rank that reads it. GB/s are the bytes that "
        "a rank has to receive, twice those of a reduce-scatter for all_reduce, by the time; for memcpy those copied.",
    ),
    _step("tiny", rounds=5),
    _step("256", rounds=5),
    _step("768", rounds=3),
    *(_step_of_ranks(size, ranks) for size in _MODELS for ranks in (1, 3, 4)),
    Benchmark(
        "memory",
        "memory",
        "The most resident memory above the start of a process that builds, shards and trains the GPT of dim 768 and 8 "
        "layers for three steps, on 2 ranks over shm (PyTorch: gloo); plain is one process. Shards that a rank reads "
        "where the other has them are the other's.",
        rounds=0,
    ),
    Benchmark(
        "two_d_step",
        "two_d_step",
        "A training step with Adam of three MLPs (64 to 192, 256 and 192 wide) on 2 x 2 ranks: `fully_shard` on tensor "
        "parallelism. tp and dp are 2 ranks of the one or the other alone. PyTorch's peer of shm and gloo is gloo.",
    ),
    Benchmark(
        "fused_optimizer",
        "fused_optimizer",
        "libtorch's fused AdamW and SGD on DTensors, 192 of 8 x 16 and 4 of 512 x 1024 floats a rank; ratio is to "
        "plain tensors.",
    ),
    Benchmark(
        "checkpoint",
        "checkpoint",
        "Saving and loading 134 MB that are sharded over 2 ranks, beside plain files of the same bytes with fsync; "
        "reads come from the disk. The extra memory is in shards of a rank.",
        rounds=3,
    ),
)


def _peer(benchmark, line, limit, what):
    return Goal(benchmark, line, limit, what, of_peer=True)


_OPS = ("add_", "mm", "t", "view", "sum", "linear", "redistribute to the same")

GOALS = (
    Goal("dtensor_dispatch", "add", 1.0, "`add` of DTensors, us"),
    *(_peer("dtensor_dispatch", op, 1 / 5, f"`{op}` of DTensors") for op in _OPS),
    Goal("collectives", "all_gather/4KiB/shm_us", 5, "all-gather of 4 KiB over shm, us"),
    Goal("collectives", "all_gather/16MiB/shm_over_floor", 1.25, "all-gather of 16 MiB over shm / floor"),
    Goal("collectives", "reduce_scatter/16MiB/shm_over_floor", 1.25, "reduce-scatter of 16 MiB over shm / floor"),
    Goal("fully_shard_step_tiny", "fully_shard/host_us_per_unit", 40, "host time of a unit and step, us"),
    _peer("fully_shard_step_tiny", "fully_shard/shm_step_ms", 1 / 15, "tiny model, step over shm"),
    Goal(
        "fully_shard_step_tiny",
        "fully_shard/shm_over_plain",
        1.25,
        "tiny model, step over shm / one process",
        floor="floor/over_plain",
    ),
    _peer("fully_shard_step_tiny", "fully_shard/gloo_step_ms", 1 / 2, "tiny model, step over gloo"),
    Goal(
        "fully_shard_step_256",
        "fully_shard/shm_over_plain",
        1.08,
        "GPT 256 x 4, step over shm / one process",
        floor="floor/over_plain",
    ),
    Goal(
        "fully_shard_step_768",
        "fully_shard/shm_over_ideal",
        1.15,
        "GPT 768 x 8, step over shm / one process with half its optimizer",
        floor="floor/over_ideal",
    ),
    Goal("memory", "fully_shard/peak_mib", 650, "GPT 768 x 8, peak memory of a rank, MiB"),
    _peer("two_d_step", "two_d/shm_step_ms", 1 / 7, "MLPs on 2 x 2 ranks, step over shm"),
    *(
        Goal("fused_optimizer", f"{test}_ratio", 1.2, f"{test} on DTensors / plain")
        for test in ("fused_adamw/192_small", "fused_sgd/192_small", "fused_adamw/4_large", "fused_sgd/4_large")
    ),
    Goal("checkpoint", "save_over_write", 0.8, "save / plain write, by bytes a second", at_least=True),
    Goal("checkpoint", "load_over_read", 0.8, "load / plain read, by bytes a second", at_least=True),
    Goal("checkpoint", "async_save_over_memcpy", 1.5, "time that `async_save` blocks / memcpy"),
)
