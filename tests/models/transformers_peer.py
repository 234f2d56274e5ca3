"""The Python side of transformers_test.cpp: tiny models of transformers, and what they compute.

transformers_peer.py write FOLDER   saves each case's model (transformers_cases.py) to FOLDER/models/CASE, and ids,
                                    logits, loss and gradients to FOLDER/expected/CASE.safetensors, by the names that
                                    tensors have in files; FOLDER/trained/CASE.safetensors has the parameters of some
                                    after five steps of AdamW
transformers_peer.py read FOLDER    opens FOLDER/saved/CASE, which C++ has saved, and compares logits
"""

import copy
import json
import os
import sys
import traceback
import zlib

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from transformers_cases import TRAINED, cases


def make_model(model_type, options, spread=1.0):
    config = AutoConfig.for_model(model_type, **options)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            scale = spread * parameter.shape[-1] ** -0.5 if parameter.dim() >= 2 else 0.3
            parameter.add_(torch.randn_like(parameter) * scale)
    return model.eval()


def save(model, folder, how):
    if how == "bare":
        model.base_model.save_pretrained(folder)
    elif how == "bfloat16":  # buffers stay as they are: these are not saved
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.bfloat16())
        copy.deepcopy(model).bfloat16().save_pretrained(folder)
    else:
        model.save_pretrained(folder, **({"max_shard_size": "8KB"} if how == "in_parts" else {}))


def use_old_style(folder):
    """Writes config.json as transformers 4 does."""
    path = os.path.join(folder, "config.json")
    with open(path) as file:
        config = json.load(file)
    config["torch_dtype"] = config.pop("dtype")
    rope = config.pop("rope_parameters", None)
    if rope and "full_attention" in rope:
        config["rope_local_base_freq"] = rope["sliding_attention"].pop("rope_theta")
        assert rope["sliding_attention"] == {"rope_type": "default"}, rope
        rope = rope["full_attention"]
    if rope:
        config["rope_theta"] = rope.pop("rope_theta")
        if "partial_rotary_factor" in rope:
            config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
        if "mscale" in rope:
            rope["type"] = rope.pop("rope_type")
        config["rope_scaling"] = rope if rope.get("rope_type") != "default" else None
    if config["model_type"] == "qwen3_moe":
        config["num_experts"] = config.pop("num_local_experts")
    with open(path, "w") as file:
        json.dump(config, file)


def stored(model_type, key, tensor):
    """Yields names and tensors as files have them: an expert's matrices each, not stacked or fused."""
    if ".experts." not in key:
        yield key.replace(".mlp.gate.", ".block_sparse_moe.gate.") if model_type == "mixtral" else key, tensor
        return
    prefix, name = key.rsplit(".", 1)
    names = {"gate_up_proj": ["gate_proj", "up_proj"], "down_proj": ["down_proj"]}[name]
    if model_type == "mixtral":
        prefix = prefix.replace(".mlp.", ".block_sparse_moe.")
        names = [{"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}[name] for name in names]
    for expert, fused in enumerate(tensor):
        for name, part in zip(names, fused.chunk(len(names))):
            yield f"{prefix}.{expert}.{name}.weight", part


def put(expected, prefix, model_type, tensors):
    for key, tensor in tensors:
        expected.update((prefix + name, part.clone()) for name, part in stored(model_type, key, tensor.detach()))


def train(model, ids):
    """Goes on from the first gradients. An epsilon this large keeps rounding out of parameters with tiny gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1, eps=1e-3)
    for step in range(5):
        if step > 0:
            optimizer.zero_grad()
            model(ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()


def write_case(folder, name, model_type, options, ids):
    torch.manual_seed(zlib.crc32(name.encode()))
    how, style = options.pop("_", ""), options.pop("__", "5")
    model = make_model(model_type, options, spread=0.7)  # with more, rounding differs by more than the tolerance
    path = os.path.join(folder, "models", name)
    save(model, path, how)
    if style == "4":
        use_old_style(path)
    output = model(ids, labels=ids, use_cache=False)
    output.loss.backward()
    expected = {"ids": ids, "logits": output.logits.detach(), "loss": output.loss.detach()}
    put(expected, "grad.", model_type, ((key, value.grad) for key, value in model.named_parameters()))
    if name in TRAINED:
        train(model, ids)
        trained = {}
        put(trained, "", model_type, model.named_parameters())
        save_file(trained, os.path.join(folder, "trained", name + ".safetensors"))
    save_file(expected, os.path.join(folder, "expected", name + ".safetensors"))


def on_two_cores(work, items):
    """Calls work(items), half of them in another process."""
    child = os.fork()
    if child == 0:
        try:
            work(items[1::2])
            os._exit(0)
        finally:
            traceback.print_exc()
            os._exit(1)
    work(items[0::2])
    if os.waitpid(child, 0)[1] != 0:
        sys.exit(1)


def write(folder):
    ids = torch.randint(0, 37, [2, 11], generator=torch.Generator().manual_seed(1))
    ids[0, 4] = 3  # pad_token_id of some

    def write_cases(some):
        for name, (model_type, options, _) in some:
            write_case(folder, name, model_type, options, ids)

    on_two_cores(write_cases, list(cases().items()))
    # Any text will do: such files are copied.
    with open(os.path.join(folder, "models", "llama.plain", "tokenizer_config.json"), "w") as file:
        file.write('{"made_by": "the test"}')


def read(folder):
    def read_saved(names):
        worst = 0
        for name in names:
            model, info = AutoModelForCausalLM.from_pretrained(
                os.path.join(folder, "saved", name),
                attn_implementation="eager",
                experts_implementation="eager",
                output_loading_info=True,
                dtype=torch.float32,
            )
            assert not info["missing_keys"] and not info["unexpected_keys"], (name, info)
            expected = load_file(os.path.join(folder, "expected", name.removesuffix(".whole_experts") + ".safetensors"))
            with torch.no_grad():
                logits = model.eval()(expected["ids"], use_cache=False).logits
            difference = ((logits - expected["logits"]).abs().max() / expected["logits"].abs().max()).item()
            worst = max(worst, difference)
            assert difference <= 1e-6, (name, difference)
        print(f"{len(names)} saved models: largest relative difference of logits {worst:.1e}", flush=True)

    on_two_cores(read_saved, sorted(os.listdir(os.path.join(folder, "saved"))))


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    if sys.argv[1] == "write":
        for name in ("models", "expected", "trained"):
            os.makedirs(os.path.join(sys.argv[2], name))
        write(sys.argv[2])
    else:
        read(sys.argv[2])
