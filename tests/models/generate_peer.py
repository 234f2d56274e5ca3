"""The Python side of generate_test.cpp: what transformers generates.

generate_peer.py FOLDER   saves tiny models to FOLDER/CASE, and to FOLDER/CASE.safetensors the prompts, padded on the
                          left, how long they are, and the tokens that follow; to FOLDER/sampling.safetensors logits and
                          the probabilities that options make of them
"""

import os
import sys

import torch
import transformers
from safetensors.torch import save_file
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from transformers_cases import cases
from transformers_peer import make_model

CASES = [
    "gpt2.plain",
    "llama.plain",
    "llama.one_key",
    "llama.linear",
    "mistral.window",
    "mixtral.plain",
    "qwen3.window",
    "qwen3_moe.mixed",
    "gemma2.plain",
    "gemma3_text.plain",
]
LENGTHS = [9, 1, 4]
STOP = 5


def write_generated(folder):
    for i, name in enumerate(CASES):
        torch.manual_seed(100 + i)
        model_type, options, _ = cases()[name]
        model = make_model(model_type, options)
        model.save_pretrained(os.path.join(folder, name))
        longest = max(LENGTHS)
        ids = torch.randint(6, 37, [len(LENGTHS), longest])
        mask = torch.stack([torch.arange(longest) >= longest - length for length in LENGTHS]).long()
        tokens = model.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=12, eos_token_id=STOP, pad_token_id=0
        )
        save_file(
            {"ids": ids, "lengths": torch.tensor(LENGTHS), "tokens": tokens[:, longest:].contiguous()},
            os.path.join(folder, name + ".safetensors"),
        )


def write_sampling(folder):
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(7)) * 3
    logits[1, :20] = logits[1, 20]  # ties
    tensors = {"logits": logits}
    for temperature, top_k, top_p in [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.5, 8, 1.0), (1.0, 0, 0.6), (0.8, 12, 0.9)]:
        processors = [TemperatureLogitsWarper(temperature)] if temperature != 1 else []
        processors += [TopKLogitsWarper(top_k)] if top_k else []
        processors += [TopPLogitsWarper(top_p)] if top_p < 1 else []
        scores = logits
        for processor in processors:
            scores = processor(None, scores)
        tensors[f"{temperature} {top_k} {top_p}"] = scores.softmax(-1)
    save_file(tensors, os.path.join(folder, "sampling.safetensors"))


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    write_generated(sys.argv[1])
    write_sampling(sys.argv[1])
