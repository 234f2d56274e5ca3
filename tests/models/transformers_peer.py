"""The Python side of transformers_test.cpp: tiny models of transformers, and what they compute.

transformers_peer.py write FOLDER   saves each case's model to FOLDER/models/CASE, and ids, logits, loss and gradients
                                    to FOLDER/expected/CASE.safetensors
transformers_peer.py read FOLDER    opens FOLDER/saved/CASE, which C++ has saved, and compares logits
"""

import copy
import json
import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "vocab_size": 37,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
GPT2 = {"vocab_size": 37, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 32}
GEMMA2 = {**SIZES, "head_dim": 8, "query_pre_attn_scalar": 10, "sliding_window": 4}
GEMMA3 = {**GEMMA2, "num_hidden_layers": 3, "sliding_window_pattern": 3}

LINEAR = {"rope_type": "linear", "factor": 3.0, "rope_theta": 5000.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 100.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1000.0}


def cases():
    """(name, model_type, options of the config), and in it "_": how to save it."""
    found = {}

    def add(model_type, sizes, **variants):
        for variant, options in variants.items():
            found[f"{model_type}.{variant}"] = (model_type, {**sizes, **options})

    add(
        "gpt2",
        GPT2,
        plain={},
        exact_gelu={"activation_function": "gelu"},
        relu={"activation_function": "relu"},
        inner={"n_inner": 30},
        untied={"tie_word_embeddings": False},
        unscaled={"scale_attn_weights": False},
        by_layer={"scale_attn_by_inverse_layer_idx": True, "n_layer": 3},
        bare={"_": "bare"},
        bfloat16={"_": "bfloat16"},
        epsilon={"layer_norm_epsilon": 1e-3, "n_head": 3},
    )
    add(
        "llama",
        SIZES,
        plain={},
        all_heads={"num_key_value_heads": 4},
        one_key={"num_key_value_heads": 1},
        tied={"tie_word_embeddings": True},
        biases={"attention_bias": True, "mlp_bias": True},
        mlp_bias={"mlp_bias": True},
        head_dim={"head_dim": 10},
        theta={"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        linear={"rope_parameters": LINEAR},
        dynamic={"rope_parameters": DYNAMIC},
        dynamic_long={"rope_parameters": DYNAMIC, "max_position_embeddings": 6},
        llama3={"rope_parameters": LLAMA3},
        yarn={"rope_parameters": YARN},
        yarn_factors={"rope_parameters": {**YARN, "beta_fast": 4.0, "beta_slow": 0.5, "truncate": False}},
        yarn_scaled={"rope_parameters": {**YARN, "attention_factor": 1.3}, "head_dim": 16},
        yarn_mscale={"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.4}, "head_dim": 16},
        gelu={"hidden_act": "gelu"},
        tanh_gelu={"hidden_act": "gelu_pytorch_tanh", "rms_norm_eps": 1e-3},
        relu={"hidden_act": "relu"},
        padding={"pad_token_id": 3},
        padding_tied={"pad_token_id": 3, "tie_word_embeddings": True},
        in_parts={"_": "in_parts", "num_hidden_layers": 4},
        bfloat16={"_": "bfloat16"},
        deep={"num_hidden_layers": 5, "hidden_size": 16},
    )
    add(
        "mistral",
        SIZES,
        all={"sliding_window": None},
        window={"sliding_window": 4},
        window_of_two={"sliding_window": 2},
        wide_window={"sliding_window": 20},
        head_dim={"sliding_window": 3, "head_dim": 12},
        tied={"sliding_window": 5, "tie_word_embeddings": True},
        llama3={"sliding_window": None, "rope_parameters": LLAMA3},
    )
    add(
        "qwen2",
        SIZES,
        plain={},
        tied={"tie_word_embeddings": True},
        window={"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
        all_windows={"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
        layer_types={
            "use_sliding_window": True,
            "sliding_window": 3,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        yarn={"rope_parameters": YARN},
        one_key={"num_key_value_heads": 1},
    )
    add(
        "qwen3",
        {**SIZES, "head_dim": 8},
        plain={},
        tied={"tie_word_embeddings": True},
        bias={"attention_bias": True},
        window={"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
        yarn={"rope_parameters": YARN},
        head_dim={"head_dim": 16, "num_key_value_heads": 4},
    )
    add(
        "gemma",
        {**SIZES, "head_dim": 8},
        plain={},
        untied={"tie_word_embeddings": False},
        bias={"attention_bias": True, "num_key_value_heads": 1},
        old_gelu={"hidden_act": "gelu"},
    )
    add(
        "gemma2",
        GEMMA2,
        plain={},
        no_caps={"attn_logit_softcapping": None, "final_logit_softcapping": None},
        hard_caps={"attn_logit_softcapping": 1.0, "final_logit_softcapping": 0.5},
        wide_window={"sliding_window": 30},
        bias={"attention_bias": True},
        untied={"tie_word_embeddings": False},
        layer_types={"layer_types": ["full_attention", "sliding_attention"]},
    )
    local = {"rope_type": "default", "rope_theta": 300.0}
    add(
        "gemma3_text",
        GEMMA3,
        plain={},
        cap={"final_logit_softcapping": 2.0},
        untied={"tie_word_embeddings": False},
        linear={"rope_parameters": {"full_attention": LINEAR, "sliding_attention": local}},
        local_linear={"rope_parameters": {"full_attention": LINEAR, "sliding_attention": {**LINEAR, "factor": 2.0}}},
        bias={"attention_bias": True},
        all_slide={"layer_types": ["sliding_attention"] * 3},
    )
    return found


def make_model(model_type, options):
    config = AutoConfig.for_model(model_type, **options)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 0.3
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
        if "mscale" in rope:
            rope["type"] = rope.pop("rope_type")
        config["rope_scaling"] = rope if rope.get("rope_type") != "default" else None
    with open(path, "w") as file:
        json.dump(config, file)


def write(folder):
    ids = torch.randint(0, 37, [2, 11], generator=torch.Generator().manual_seed(1))
    ids[0, 4] = 3  # pad_token_id of some
    for i, (name, (model_type, options)) in enumerate(cases().items()):
        torch.manual_seed(i)
        how = options.pop("_", "")
        model = make_model(model_type, options)
        path = os.path.join(folder, "models", name)
        save(model, path, how)
        if i % 2 and name != "gemma3_text.local_linear":
            use_old_style(path)
        output = model(ids, labels=ids, use_cache=False)
        output.loss.backward()
        expected = {"ids": ids, "logits": output.logits.detach(), "loss": output.loss.detach()}
        for key, parameter in model.named_parameters():
            expected["grad." + key] = parameter.grad
        save_file(expected, os.path.join(folder, "expected", name + ".safetensors"))
    # Any text will do: such files are copied.
    with open(os.path.join(folder, "models", "llama.plain", "tokenizer_config.json"), "w") as file:
        file.write('{"made_by": "the test"}')


def read(folder):
    worst = 0
    for name in sorted(os.listdir(os.path.join(folder, "saved"))):
        path = os.path.join(folder, "saved", name)
        model, info = AutoModelForCausalLM.from_pretrained(
            path, attn_implementation="eager", output_loading_info=True, dtype=torch.float32
        )
        assert not info["missing_keys"] and not info["unexpected_keys"], (name, info)
        expected = load_file(os.path.join(folder, "expected", name + ".safetensors"))
        with torch.no_grad():
            logits = model.eval()(expected["ids"], use_cache=False).logits
        difference = ((logits - expected["logits"]).abs().max() / expected["logits"].abs().max()).item()
        worst = max(worst, difference)
        assert difference <= 1e-6, (name, difference)
    print(f"saved models: largest relative difference of logits {worst:.1e}")


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    if sys.argv[1] == "write":
        for name in ("models", "expected"):
            os.makedirs(os.path.join(sys.argv[2], name))
        write(sys.argv[2])
    else:
        read(sys.argv[2])
