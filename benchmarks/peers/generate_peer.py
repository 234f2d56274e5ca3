"""The Python side of benchmarks/models/generate.cpp: transformers' generate on one thread.

generate_peer.py make FOLDER                             saves a Llama of some 100 million parameters
generate_peer.py measure FOLDER DTYPE BATCH PROMPT NEW   prints "name value": tokens per second, and the sum of new ids
"""

import os
import sys
import time

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM


def make(folder):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.05,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    print("parameters", sum(parameter.numel() for parameter in model.parameters()))


def measure(folder, dtype, batch, prompt, new):
    model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
    ids = (torch.arange(batch * prompt).view(batch, prompt) * 7919 + 13) % 32000

    def run(tokens):
        start = time.perf_counter()
        with torch.inference_mode():
            found = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=tokens,
                max_new_tokens=tokens,
                pad_token_id=0,
                eos_token_id=None,
            )
        return time.perf_counter() - start, found

    run(2)
    seconds, found = run(new)
    print("speed", batch * new / seconds)
    print("sum", int(found[:, prompt:].sum()))


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    if sys.argv[1] == "make":
        make(sys.argv[2])
    else:
        measure(sys.argv[2], sys.argv[3], *(int(argument) for argument in sys.argv[4:]))
