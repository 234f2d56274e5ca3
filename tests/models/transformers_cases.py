"""The models of transformers_test.cpp: a few with names, and combinations in which all pairs of options occur.

transformers_cases.py              writes docs/generated/models.md to the standard output
transformers_cases.py --check FILE fails unless this is the file's content
"""

import itertools
import random
import sys

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
MIXTRAL = {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}
QWEN3_MOE = {**SIZES, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 14}
BASES = {
    "gpt2": GPT2,
    "llama": SIZES,
    "mistral": SIZES,
    "mixtral": MIXTRAL,
    "qwen2": SIZES,
    "qwen3": {**SIZES, "head_dim": 8},
    "qwen3_moe": QWEN3_MOE,
    "gemma": {**SIZES, "head_dim": 8},
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "stablelm": {**SIZES, "hidden_size": 32},
}

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
LOCAL = {"rope_type": "default", "rope_theta": 300.0}


def rope(**values):
    return {"rope_parameters": values}


# Choices of an option: what the table calls each, and the keys that make it. "_" and "__" are not keys of config.json:
# what is saved, and in which version's style.
POSITIONS = {
    "default": {},
    "theta": rope(rope_type="default", rope_theta=500.0),
    "linear": rope(**LINEAR),
    "dynamic": rope(**DYNAMIC),
    "dynamic, long": {**rope(**DYNAMIC), "max_position_embeddings": 6},
    "llama3": rope(**LLAMA3),
    "yarn": rope(**YARN),
    "yarn, betas": rope(**YARN, beta_fast=4.0, beta_slow=0.5, truncate=False),
    "yarn, factor": rope(**YARN, attention_factor=1.3),
    "yarn, mscale": rope(**YARN, mscale=0.7, mscale_all_dim=0.4),
}
FEW_POSITIONS = {name: POSITIONS[name] for name in ("default", "linear", "llama3", "yarn")}
KEYS = {"2 of 4": {}, "4 of 4": {"num_key_value_heads": 4}, "1 of 4": {"num_key_value_heads": 1}}
HEAD_DIM = {"default": {}, "10": {"head_dim": 10}, "16": {"head_dim": 16}}
ACTIVATION = {
    "silu": {},
    "gelu": {"hidden_act": "gelu"},
    "tanh gelu": {"hidden_act": "gelu_pytorch_tanh"},
    "relu": {"hidden_act": "relu"},
}
UNTIED_OR_TIED = {"own": {}, "tied": {"tie_word_embeddings": True}}
TIED_OR_UNTIED = {"tied": {}, "own": {"tie_word_embeddings": False}}
PADDING = {"none": {}, "3": {"pad_token_id": 3}}
ATTENTION_BIAS = {"no": {}, "yes": {"attention_bias": True}}
LAYERS = {"2": {}, "1": {"num_hidden_layers": 1}, "3": {"num_hidden_layers": 3}}
FILES = {"one": {}, "parts": {"_": "in_parts"}, "bfloat16": {"_": "bfloat16"}}
STYLE = {"5": {}, "4": {"__": "4"}}
EPSILON = {"default": {}, "1e-3": {"rms_norm_eps": 1e-3}}
WINDOW = {"none": {"sliding_window": None}, "4": {"sliding_window": 4}, "2": {"sliding_window": 2}}
ROUTER_LOSS = {"no": {}, "yes": {"output_router_logits": True, "router_aux_loss_coef": 0.5}}
SHARED = {"norm's epsilon": EPSILON, "files": FILES, "keys of version": STYLE}

OPTIONS = {
    "gpt2": {
        "activation": {
            "gelu_new": {},
            "gelu": {"activation_function": "gelu"},
            "relu": {"activation_function": "relu"},
            "silu": {"activation_function": "silu"},
        },
        "inner size": {"default": {}, "30": {"n_inner": 30}},
        "heads": {"4": {}, "3": {"n_head": 3}, "1": {"n_head": 1}},
        "output layer": TIED_OR_UNTIED,
        "scores scaled": {"yes": {}, "no": {"scale_attn_weights": False}},
        "scaled by layer": {"no": {}, "yes": {"scale_attn_by_inverse_layer_idx": True}},
        "layers": {"2": {}, "1": {"n_layer": 1}, "3": {"n_layer": 3}},
        "norm's epsilon": {"default": {}, "1e-3": {"layer_norm_epsilon": 1e-3}},
        "files": {**FILES, "bare": {"_": "bare"}},
        "keys of version": STYLE,
    },
    "llama": {
        "positions": POSITIONS,
        "keys": KEYS,
        "head_dim": HEAD_DIM,
        "activation": ACTIVATION,
        "biases": {
            "none": {},
            "attention": {"attention_bias": True},
            "MLP": {"mlp_bias": True},
            "all": {"attention_bias": True, "mlp_bias": True},
        },
        "output layer": UNTIED_OR_TIED,
        "pad_token_id": PADDING,
        "layers": LAYERS,
        **SHARED,
    },
    "mistral": {
        "positions": FEW_POSITIONS,
        "window": {**WINDOW, "20": {"sliding_window": 20}},
        "keys": KEYS,
        "head_dim": HEAD_DIM,
        "activation": ACTIVATION,
        "output layer": UNTIED_OR_TIED,
        "pad_token_id": PADDING,
        **SHARED,
    },
    "mixtral": {
        "experts": {
            "2 of 4": {},
            "2 of 8": {"num_local_experts": 8},
            "3 of 3": {"num_local_experts": 3, "num_experts_per_tok": 3},
            "3 of 16": {"num_local_experts": 16, "num_experts_per_tok": 3},
        },
        "router loss": ROUTER_LOSS,
        "positions": FEW_POSITIONS,
        "window": WINDOW,
        "keys": KEYS,
        "head_dim": {"6": {"head_dim": 6}, "16": {"head_dim": 16}},
        "activation": ACTIVATION,
        "output layer": UNTIED_OR_TIED,
        **SHARED,
    },
    "qwen2": {
        "positions": FEW_POSITIONS,
        "window": {
            "none": {},
            "from layer 1": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
            "all layers": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0},
            "layer_types": {
                "use_sliding_window": True,
                "sliding_window": 4,
                "layer_types": ["sliding_attention", "full_attention"],
            },
        },
        "keys": KEYS,
        "activation": ACTIVATION,
        "output layer": UNTIED_OR_TIED,
        "pad_token_id": PADDING,
        **SHARED,
    },
    "qwen3": {
        "positions": FEW_POSITIONS,
        "window": {
            "none": {},
            "from layer 1": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
            "all layers": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0},
        },
        "keys": KEYS,
        "head_dim": {"8": {}, "16": {"head_dim": 16}},
        "attention_bias": ATTENTION_BIAS,
        "activation": ACTIVATION,
        "output layer": UNTIED_OR_TIED,
        **SHARED,
    },
    "qwen3_moe": {
        "experts": {
            "2 of 4": {},
            "1 of 5": {"num_experts": 5, "num_experts_per_tok": 1},
            "4 of 16": {"num_experts": 16, "num_experts_per_tok": 4},
        },
        "norm_topk_prob": {"no": {}, "yes": {"norm_topk_prob": True}},
        "layers with experts": {
            "all": {},
            "every second": {"decoder_sparse_step": 2},
            "not the first": {"mlp_only_layers": [0]},
        },
        "router loss": ROUTER_LOSS,
        "positions": FEW_POSITIONS,
        "window": {"none": {}, "4": {"use_sliding_window": True, "sliding_window": 4}},
        "keys": KEYS,
        "head_dim": {"8": {}, "16": {"head_dim": 16}},
        "attention_bias": ATTENTION_BIAS,
        "output layer": UNTIED_OR_TIED,
        **SHARED,
    },
    "gemma": {
        "positions": FEW_POSITIONS,
        "keys": KEYS,
        "head_dim": {"8": {}, "16": {"head_dim": 16}},
        "activation": {"tanh gelu": {}, "old name": {"hidden_act": "gelu"}},
        "attention_bias": ATTENTION_BIAS,
        "output layer": TIED_OR_UNTIED,
        **SHARED,
    },
    "gemma2": {
        "positions": FEW_POSITIONS,
        "caps": {
            "both": {},
            "none": {"attn_logit_softcapping": None, "final_logit_softcapping": None},
            "scores": {"attn_logit_softcapping": 1.0, "final_logit_softcapping": None},
            "logits": {"attn_logit_softcapping": None, "final_logit_softcapping": 0.5},
        },
        "window": {
            "4": {},
            "30": {"sliding_window": 30},
            "layer_types": {"layer_types": ["full_attention", "sliding_attention"]},
        },
        "keys": KEYS,
        "head_dim": {"8": {}, "12": {"head_dim": 12}},
        "attention_bias": ATTENTION_BIAS,
        "output layer": TIED_OR_UNTIED,
        **SHARED,
    },
    "gemma3_text": {
        "positions": {
            "default": {},
            "linear": rope(full_attention=LINEAR, sliding_attention=LOCAL),
            "both linear": rope(full_attention=LINEAR, sliding_attention={**LINEAR, "factor": 2.0}),
            "llama3": rope(full_attention=LLAMA3, sliding_attention=LOCAL),
        },
        "cap of logits": {"none": {}, "2": {"final_logit_softcapping": 2.0}},
        "window": {
            "two layers of three": {},
            "all": {"layer_types": ["sliding_attention"] * 3},
            "2": {"sliding_window": 2},
        },
        "keys": KEYS,
        "attention_bias": ATTENTION_BIAS,
        "output layer": TIED_OR_UNTIED,
        **SHARED,
    },
    "stablelm": {
        "rotated part": {
            "1/4": {},
            "1/2": {"partial_rotary_factor": 0.5},
            "3/4": {"partial_rotary_factor": 0.75},
            "whole": {"partial_rotary_factor": 1.0},
        },
        "positions": FEW_POSITIONS,
        "keys": KEYS,
        "biases": {"none": {}, "query, key, value": {"use_qkv_bias": True}},
        "activation": ACTIVATION,
        "output layer": UNTIED_OR_TIED,
        "norm's epsilon": {"default": {}, "1e-3": {"layer_norm_eps": 1e-3}},
        "files": FILES,
        "keys of version": STYLE,
    },
}

# What no config.json or file of a family can say.
IMPOSSIBLE = [
    {"output layer": "own", "files": "bare"},
    {"positions": "both linear", "keys of version": "4"},
    {"experts": "1 of 5", "norm_topk_prob": "yes"},  # weights of 1: the router's gradient is rounding
]

# Those that are tested under several layouts too, and trained.
NAMED = {
    "gpt2.plain": {},
    "gpt2.epsilon": {"layer_norm_epsilon": 1e-3, "n_head": 3},
    "llama.plain": {},
    "llama.tied": {"tie_word_embeddings": True},
    "llama.padding_tied": {"pad_token_id": 3, "tie_word_embeddings": True},
    "llama.one_key": {"num_key_value_heads": 1},
    "llama.linear": {"rope_parameters": LINEAR},
    "llama.biases": {"attention_bias": True, "mlp_bias": True},
    "mistral.window": {"sliding_window": 4},
    "mixtral.plain": {},
    "mixtral.many": {"num_local_experts": 16, "num_experts_per_tok": 3, "num_key_value_heads": 1},
    "mixtral.router_loss": {"num_local_experts": 5, **ROUTER_LOSS["yes"]},
    "qwen2.tied": {"tie_word_embeddings": True},
    "qwen3.window": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    "qwen3_moe.mixed": {"mlp_only_layers": [0], "norm_topk_prob": True, "num_hidden_layers": 3},
    "qwen3_moe.router_loss": ROUTER_LOSS["yes"],
    "gemma.plain": {},
    "gemma2.plain": {},
    "gemma3_text.plain": {},
    "stablelm.biases": {"use_qkv_bias": True},
}
TRAINED = [name for name in NAMED if name not in ("gpt2.epsilon", "llama.plain", "llama.one_key", "llama.linear", "mixtral.plain")]


def is_possible(row):
    return not any(all(row.get(option) == choice for option, choice in rule.items()) for rule in IMPOSSIBLE)


def pairs_of(row):
    return set(itertools.combinations(sorted(row.items()), 2))


def combinations(options, seed):
    """Rows {option: choice} in which every possible pair of choices occurs: greedily, the best of some random rows."""
    random_ = random.Random(seed)
    left = set()
    for (a, choices), (b, others) in itertools.combinations(options.items(), 2):
        for pair in itertools.product(choices, others):
            row = dict(zip((a, b), pair))
            left |= pairs_of(row) if is_possible(row) else set()
    rows = []
    while left:
        candidates = []
        for _ in range(40):
            row = {option: random_.choice(sorted(choices)) for option, choices in options.items()}
            row.update(random_.choice(sorted(left)))
            if is_possible(row):
                candidates.append(row)
        best = max(candidates, key=lambda row: len(pairs_of(row) & left), default=None)
        if best and pairs_of(best) & left:
            rows.append(best)
            left -= pairs_of(best)
    return rows


def cases():
    """Returns (model_type, options of the config, choices) by name."""
    found = {}
    for name, options in NAMED.items():
        model_type = name.split(".")[0]
        found[name] = (model_type, {**BASES[model_type], **options}, {})
    for seed, (model_type, options) in enumerate(OPTIONS.items()):
        for i, row in enumerate(combinations(options, seed)):
            config = dict(BASES[model_type])
            for option, choice in row.items():
                config.update(options[option][choice])
            found[f"{model_type}.{i:02}"] = (model_type, config, row)
    return found


def table():
    found = cases()
    lines = [
        "# Models that are compared with transformers",
        "",
        "Generated by tests/models/transformers_cases.py; a test checks that it is up to date. Each is made with random",
        "weights by transformers 5.24, and logits, loss and all gradients are compared; in parentheses, in how many models",
        "a choice occurs. In each family, every pair of choices of two options occurs in a model.",
        "",
        f"{len(found)} models, of which {len(NAMED)} are also compared under layouts of several ranks, and {len(TRAINED)} "
        "after five steps of AdamW.",
        "",
        "| family | models | option | choices |",
        "|---|---|---|---|",
    ]
    for model_type, options in OPTIONS.items():
        rows = [row for family, _, row in found.values() if family == model_type]
        for option, choices in options.items():
            counts = (f"{choice} ({sum(row.get(option) == choice for row in rows)})" for choice in choices)
            lines.append(f"| {model_type} | {len(rows)} | {option} | {', '.join(counts)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--check"]:
        with open(sys.argv[2]) as file:
            if file.read() != table():
                sys.exit(f"{sys.argv[2]} is old: python3 tests/models/transformers_cases.py > docs/generated/models.md")
    else:
        print(table(), end="")
