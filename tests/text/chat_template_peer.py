"""Chats as transformers' apply_chat_template renders and tokenizes them, for chat_template_test.cpp.

chat_template_peer.py <folder> [<templates>]: writes
  templates.json   [name, template or null, bos or null, eos or null]
  cases.json       [index of the template, messages, whether with a prompt for an answer, text or null if refused]
  tokenizer.json   a tokenizer, and
  masks.json       [messages, ids, which of them the assistant wrote] by it, in ChatML
With <templates>, a folder of <name>@<anything>.jinja, the templates are those files: what a family publishes.

The texts below are what the families publish, written down from memory and recognised by their hashes. Those marked as
PLAIN are what is left of long ones for plain chats, without tools: they stand for them by name.
"""

import json
import pathlib
import random
import sys

import jinja2
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

ALTERNATE = (
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
)
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    + ALTERNATE
    + "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}{% else %}"
    "{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ "
    "message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
PLAIN_LLAMA31 = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Cutting Knowledge Date: December 2023\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
MISTRAL_V02 = (
    "{{ bos_token }}{% for message in messages %}"
    + ALTERNATE
    + "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}{% else %}"
    "{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
MISTRAL_V01 = MISTRAL_V02.replace("eos_token}}", "eos_token + ' ' }}")
PLAIN_MISTRAL = """{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('After the optional system message, conversation roles must alternate') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {%- if SYSTEM_WITH and system_message is defined %}
            {{- 'BEFORE' + system_message + '\\n\\n' + message['content'] + 'AFTER' }}
        {%- else %}
            {{- 'BEFORE' + message['content'] + 'AFTER' }}
        {%- endif %}
    {%- elif message['role'] == 'assistant' %}
        {{- ANSWER + eos_token}}
    {%- else %}
        {{- raise_exception('Only user and assistant roles are supported') }}
    {%- endif %}
{%- endfor %}
"""


def plain_mistral(system_with, before, after, answer):
    text = PLAIN_MISTRAL.replace("SYSTEM_WITH", system_with).replace("BEFORE", before)
    return text.replace("AFTER", after).replace("ANSWER", answer)


CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
QWEN2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PLAIN_QWEN25 = QWEN2.replace("You are a", "You are Qwen, created by Alibaba Cloud. You are a")
PLAIN_QWEN3 = """{%- set ns = namespace(searching=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and not(message.content.startswith('<tool_response>') and
        message.content.endswith('</tool_response>')) %}
        {%- set ns.searching = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" or message.role == "system" %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- else %}
        {%- set content = message.content %}
        {%- set thoughts = '' %}
        {%- if '</think>' in message.content %}
            {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
            {%- set thoughts = message.content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if loop.index0 > ns.last_query_index and (loop.last or thoughts) %}
            {{- '<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
GEMMA2 = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}"
    + ALTERNATE
    + "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}"
    "{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
PLAIN_GEMMA3 = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else "") }}
    {{- message['content'] | trim }}
    {{- '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model\\n'}}
{%- endif -%}
"""

TOKENS = {
    "llama2": ("<s>", "</s>"),
    "llama3": ("<|begin_of_text|>", "<|eot_id|>"),
    "mistral": ("<s>", "</s>"),
    "gemma": ("<bos>", "<eos>"),
    "chatml": (None, "<|im_end|>"),
    "qwen": (None, "<|im_end|>"),
}

# (name, template, whether it is recognised)
TEMPLATES = [
    ("llama2", LLAMA2, True),
    ("llama3", LLAMA3, True),
    ("llama3.1", PLAIN_LLAMA31, False),
    ("mistral-v0.1", MISTRAL_V01, True),
    ("mistral-v0.2", MISTRAL_V02, True),
    ("mistral-v1", plain_mistral("loop.first", " [INST] ", " [/INST]", "' ' + message['content']"), False),
    ("mistral-v3", plain_mistral("loop.last", "[INST] ", "[/INST]", "' ' + message['content']|trim"), False),
    ("mistral-v3-tekken", plain_mistral("loop.last", "[INST]", "[/INST]", "message['content']"), False),
    ("chatml", CHATML, True),
    ("qwen2", QWEN2, True),
    ("qwen2.5", PLAIN_QWEN25, False),
    ("qwen3", PLAIN_QWEN3, False),
    ("gemma2", GEMMA2, True),
    ("gemma3", PLAIN_GEMMA3, False),
]

TEXTS = [
    "Hi",
    "",
    "  two words \n",
    "\n\nlines\n\n\nand lines\n",
    "\u00a0\u3000\x1c\x85 spaces of many kinds \u2003\x1f",
    "\u00e9t\u00e9 \U0001f600 \u4f60\u597d",
    "<think>\n\nhm\n\n</think>\n\nYes",
    "<think>a</think>b</think>\nc",
    "no start</think>\n\n\nd",
    "<tool_response>3</tool_response>",
    "{{ bos_token }} '\"\\n<s>",
    "def f(x):\n    return x\n",
]
ORDERS = ["u", "ua", "su", "sua", "uau", "suau", "uaua", "suauaua", "s", "uu", "a", "au", "suu", "sa"]
ANY_ORDERS = ["usu", "suas", "aa", "uas", "uaa", "suaaa"]
ROLES = {"s": "system", "u": "user", "a": "assistant"}


def conversations(name, draws):
    takes_any = name.startswith(("llama3", "chatml", "qwen"))
    for order in ORDERS + (ANY_ORDERS if takes_any else []):
        for _ in range(8):
            yield [{"role": ROLES[letter], "content": draws.choice(TEXTS)} for letter in order]


def render(tokenizer, template, messages, prompt):
    try:
        return tokenizer.apply_chat_template(
            messages, chat_template=template, add_generation_prompt=prompt, tokenize=False, date_string="1 Jan 2030"
        )
    except jinja2.exceptions.TemplateError:
        return None


def write(folder, name, value):
    (folder / name).write_text(json.dumps(value), encoding="ascii")


def write_cases(folder, templates):
    draws = random.Random(5)
    listed, cases = [], []
    for index, (name, template, is_recognised) in enumerate(templates):
        family = next(family for family in TOKENS if name.startswith(family))
        bos, eos = TOKENS[family]
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), bos_token=bos, eos_token=eos)
        listed.append([name, template if is_recognised else None, bos, eos])
        for messages in conversations(name, draws):
            for prompt in False, True:
                cases.append([index, messages, prompt, render(tokenizer, template, messages, prompt)])
    write(folder, "templates.json", listed)
    write(folder, "cases.json", cases)


def write_masks(folder):
    splits = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(splits, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = pathlib.Path(__file__).read_text(encoding="utf-8")
    tokenizer.train_from_iterator([corpus, "\n\n \n\n\n\n" * 20], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    marked = (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
        "{% if message['role'] == 'assistant' %}"
        "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
        "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=marked)
    masks = []
    for messages in conversations("chatml", random.Random(6)):
        encoded = fast.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        masks.append([messages, encoded["input_ids"], encoded["assistant_masks"]])
    write(folder, "masks.json", masks)


def main(folder, published=None):
    templates = TEMPLATES
    if published:
        files = sorted(pathlib.Path(published).glob("*.jinja"))
        templates = [(file.name.partition("@")[0], file.read_text(encoding="utf-8"), True) for file in files]
    write_cases(pathlib.Path(folder), templates)
    write_masks(pathlib.Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
