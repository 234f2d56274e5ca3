"""The Python side of lora_test.cpp: tiny models with adapters of PEFT, and how they train.

peft_peer.py write FOLDER   saves each case's model to FOLDER/models/CASE and its adapter to FOLDER/adapters/CASE; to
                            FOLDER/expected/CASE.safetensors ids, logits, loss, gradients, and logits and adapters after
                            steps of AdamW
peft_peer.py read FOLDER    opens the adapters of FOLDER/saved/CASE and the models of FOLDER/merged/CASE, which C++ has
                            trained as far and saved, and compares logits
"""

import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import transformers_peer as peer
from transformers_cases import GPT2, SIZES

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ATTENTION_OF_LAST = {"target_modules": ["q_proj", "o_proj"], "layers_to_transform": [1]}
STEPS = 5

# (model_type, options of the model, options of LoraConfig)
CASES = {
    "llama": ("llama", SIZES, {"target_modules": ["q_proj", "v_proj"], "r": 4, "lora_alpha": 8}),
    "llama.all": (
        "llama",
        {**SIZES, "attention_bias": True, "mlp_bias": True},
        {"target_modules": [*ALL, "lm_head"], "r": 3, "lora_alpha": 5.5, "use_rslora": True},
    ),
    "qwen3": ("qwen3", {**SIZES, "head_dim": 8}, {**ATTENTION_OF_LAST, "r": 5, "lora_alpha": 5}),
    "gemma": (
        "gemma",
        {**SIZES, "head_dim": 8, "num_key_value_heads": 1},
        {"target_modules": r".*\.(self_attn\.[kv]_proj|mlp\.(up|down)_proj)", "r": 2, "lora_alpha": 3},
    ),
    "gpt2": ("gpt2", GPT2, {"target_modules": ["mlp.c_fc", "c_proj"], "fan_in_fan_out": True, "r": 4}),
}


def stored_name(name):
    return name.replace(".default.", ".")


def make_adapters(name, model):
    options = {"init_lora_weights": "gaussian" if name == "qwen3" else True, **CASES[name][2]}
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options))
    with torch.no_grad():
        for key, parameter in adapted.named_parameters():
            if "lora_B" in key:  # zeros would leave A without a gradient
                parameter.normal_(std=0.3)
    return adapted.eval()


def train(model, ids):
    """What the model computes, and has after some steps."""
    trained = {stored_name(key): value for key, value in model.named_parameters() if value.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2, weight_decay=0.1, eps=1e-3)
    output = model(input_ids=ids, labels=ids, use_cache=False)
    expected = {"ids": ids, "logits": output.logits.detach(), "loss": output.loss.detach()}
    for step in range(STEPS):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        if step == 0:
            expected.update({"grad." + key: value.grad.clone() for key, value in trained.items()})
        optimizer.step()
    with torch.no_grad():
        expected["trained_logits"] = model(input_ids=ids, use_cache=False).logits
    return {**expected, **{"trained." + key: value.detach() for key, value in trained.items()}}


def write(folder):
    ids = torch.randint(0, 37, [6, 11], generator=torch.Generator().manual_seed(1))
    for i, (name, (model_type, options, _)) in enumerate(CASES.items()):
        torch.manual_seed(i)
        model = peer.make_model(model_type, options)
        model.save_pretrained(os.path.join(folder, "models", name))
        adapted = make_adapters(name, model)
        # Without the frozen output layer, which PEFT would save beside its adapter.
        adapted.save_pretrained(os.path.join(folder, "adapters", name), save_embedding_layers=False)
        save_file(train(adapted, ids), os.path.join(folder, "expected", name + ".safetensors"))


def largest_difference(model, expected):
    with torch.no_grad():
        logits = model.eval()(input_ids=expected["ids"], use_cache=False).logits
    wanted = expected["trained_logits"]
    return ((logits - wanted).abs().max() / wanted.abs().max()).item()


def read(folder):
    worst = 0
    for name in CASES:
        expected = load_file(os.path.join(folder, "expected", name + ".safetensors"))

        def open_model(path):
            return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32)

        adapted = peft.PeftModel.from_pretrained(
            open_model(os.path.join(folder, "models", name)), os.path.join(folder, "saved", name)
        )
        merged = open_model(os.path.join(folder, "merged", name))
        for model in (adapted, merged):
            difference = largest_difference(model, expected)
            worst = max(worst, difference)
            assert difference <= 1e-5, (name, type(model), difference)
    print(f"saved adapters and merged models: largest relative difference of logits {worst:.1e}")


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    if sys.argv[1] == "write":
        for kind in ("models", "adapters", "expected"):
            os.makedirs(os.path.join(sys.argv[2], kind))
        write(sys.argv[2])
    else:
        read(sys.argv[2])
