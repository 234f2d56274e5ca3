"""The Python side of interop_test.cpp: reads what C++ wrote with safetensors and torch's reader, and writes with both."""

import json
import os
import sys

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file


def numbered():
    def make(sizes, factor, dtype):
        count = torch.Size(sizes).numel()
        return (torch.arange(count) * factor).view(sizes).to(dtype)

    return {
        "in.weight": make([5, 7], 0.5, torch.float32),
        "in.bias": make([5], 1, torch.bfloat16),
        "scalar": make([], 1, torch.float64),
        "count": make([3], 1, torch.int64),
    }


def expect_equal(tensors):
    expected = numbered()
    assert sorted(tensors) == sorted(expected), sorted(tensors)
    for key, value in expected.items():
        assert tensors[key].dtype == value.dtype and torch.equal(tensors[key], value), key


def read(folder, single):
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load

    with open(os.path.join(folder, "model.safetensors.index.json")) as file:
        index = json.load(file)
    tensors = {}
    for key, name in index["weight_map"].items():
        with safe_open(os.path.join(folder, name), framework="pt") as file:
            tensors[key] = file.get_tensor(key)
    assert len(set(index["weight_map"].values())) == 2, index
    expect_equal(tensors)
    expect_equal(load_file(single))

    state = {key: torch.zeros_like(value) for key, value in numbered().items()}
    load(state, storage_reader=HuggingFaceStorageReader(folder), no_dist=True)
    expect_equal(state)


def write(folder):
    from torch.distributed.checkpoint import HuggingFaceStorageWriter, save

    tensors = numbered()
    save_file(tensors, os.path.join(folder, "single.safetensors"), metadata={"format": "pt"})
    save(tensors, storage_writer=HuggingFaceStorageWriter(os.path.join(folder, "dcp")), no_dist=True)
    sharded = HuggingFaceStorageWriter(os.path.join(folder, "dcp_sharded"), save_distributed=True)
    save(tensors, storage_writer=sharded, no_dist=True)

    # Parts of a tensor in several files, as ranks of torch write them.
    cut = tensors["in.weight"]
    parts = {"shard-00001": (cut[:3], [0, 0]), "shard-00002": (cut[3:], [3, 0])}
    os.makedirs(os.path.join(folder, "hf"), exist_ok=True)
    for name, (part, offsets) in parts.items():
        content = {"in.weight": part.contiguous()}
        info = {"in.weight": {"saved_offsets": offsets}}
        if name == "shard-00001":
            for key in ("in.bias", "scalar", "count"):
                content[key] = tensors[key]
                info[key] = {"saved_offsets": [0] * tensors[key].dim()}
        path = os.path.join(folder, "hf", name + "-model-00001-of-00001.safetensors")
        save_file(content, path, metadata={"DCP_SHARDING_INFO": json.dumps(info)})


if __name__ == "__main__":
    read(*sys.argv[2:]) if sys.argv[1] == "read" else write(sys.argv[2])
