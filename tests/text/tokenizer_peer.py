"""Tokenizers and what Python's `tokenizers` makes of texts with them, for tokenizer_test.cpp.

tokenizer_peer.py <folder> <megabytes>: writes <name>.json (tokenizer.json), <name>.vocab (a JSON list of [id, token])
and <name>.cases: for each text its bytes, ids, and what is decoded, with the special tokens left out in every second
text. Lengths are 32-bit integers. Texts are source code that every machine has, and made up: many scripts, emoji,
whitespace, broken UTF-8.
"""

import array
import importlib.util
import json
import os
import random
import re
import struct
import sys
import sysconfig
import unicodedata

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
O200K = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
DEEPSEEK = [
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SCRIPTS = [(0x61, 26), (0x41, 26), (0xC0, 64), (0x3B1, 24), (0x430, 32), (0x5D0, 27), (0x627, 26), (0x905, 50)]
SCRIPTS += [(0xE01, 46), (0x4E00, 300), (0x3041, 86), (0x30A1, 90), (0xAC00, 300), (0x1F600, 80), (0x300, 20)]
SPACES = [
    " ",
    "  ",
    "\n",
    "\t",
    "\r\n",
    "\n\n",
    "    ",
    " \n ",
    "\u3000",
    "\xa0",
    "\x85",
    "\u2003",
    "\u180e",
    "▁",
    "▁▁",
]
ODD = [
    "'s",
    "'S",
    "'ſ",
    "'LL",
    "1234567",
    "３４",
    "²³",
    "Ⅷ",
    "½",
    "e\u0301",
    "ﬁ",
    "İ",
    "ẞ",
    "👩‍👩‍👧‍👦",
    "🇩🇪",
    "\x00",
    "\ufeff",
]
ODD += [
    "don't",
    "_x1",
    "a.b",
    "...",
    "!?",
    "//",
    "#include",
    "<s>",
    "</s>",
    "<|im_start|>",
    "[MASK]",
    "foo",
    "Foo",
    "x" * 70,
]
ODD += [
    "カ\u3099",
    "\u1100\u1161\u11a8",
    "각\u11a8",
    "ö",
    "o\u0308",
    "\u0344",
    "\u2126",
    "¼",
    "\u2028",
    "\ufffd",
    "q\u0307\u0323",
]
# Those of well-known models get all texts where there are many; the others get a share.
MODELS = ["gpt2_prefix_False", "llama3", "qwen2", "o200k", "llama2", "gemma"]
BROKEN = [
    b"\xff",
    b"\xe2\x82",
    b"\xed\xa0\x80",
    b"\xf0\x9f\x98",
    b"\xc0\x80",
    b"\xf4\x90\x80\x80",
    b"\x80\x80",
    b"\xe2\x28\xa1",
]


def is_new_mark(character):
    """Whether it is a mark that the normalizers of `tokenizers`, whose tables are old, may not know."""
    is_mark = unicodedata.category(character).startswith("M")
    return is_mark and unicodedata.ucd_3_2_0.category(character) == "Cn"


NEW_MARKS = re.compile("[" + "".join(filter(is_new_mark, map(chr, range(0x110000)))) + "]")


def source_files():
    folders = [sysconfig.get_path("stdlib"), *importlib.util.find_spec("torch").submodule_search_locations]
    for folder in folders:
        for parent, subfolders, names in sorted(os.walk(folder)):
            subfolders.sort()
            for name in sorted(names):
                if name.endswith((".py", ".h", ".cuh", ".pyi", ".txt", ".rst", ".cpp")):
                    yield os.path.join(parent, name)


def source_texts(size):
    """The same share of each of many files, all of them when that is needed."""
    files = list(source_files())
    files = random.Random(3).sample(files, len(files))
    for share in (4096, 1 << 30):
        for file in files:
            if size <= 0:
                return
            with open(file, "rb") as opened:
                text = opened.read(share)
            if not NEW_MARKS.search(text.decode(errors="replace")):
                size -= len(text)
                yield text


def made_up_word(rng):
    first, count = rng.choice(SCRIPTS)
    # Few different words, so that they become tokens.
    local = random.Random(rng.randrange(60))
    return "".join(chr(first + local.randrange(count)) for _ in range(local.randrange(1, 9)))


def any_character(rng):
    while True:
        character = chr(rng.choice([rng.randrange(0x3000), rng.randrange(0x110000)]))
        if unicodedata.category(character) not in ("Cn", "Cs", "Co") and not is_new_mark(character):
            return character


def made_up_text(rng, size):
    text = bytearray()
    while len(text) < size:
        kind = rng.randrange(40)
        if kind < 24:
            text += made_up_word(rng).encode()
        elif kind < 30:
            text += rng.choice(ODD).encode()
        elif kind < 33:
            text += any_character(rng).encode()
        elif kind == 33:
            text += rng.choice(BROKEN)
        elif kind == 34:
            text += rng.choice(SPACES).encode() * rng.randrange(1, 40)
        if kind % 3:
            text += rng.choice(SPACES[:2]).encode() if kind % 6 else rng.choice(SPACES).encode()
    return bytes(text)


def make_texts(megabytes):
    rng = random.Random(1)
    texts = [
        b"",
        b" ",
        b"\x00",
        b"a",
        b"\xff",
        b"\n\n\n",
        "\u0301".encode(),
        b" " * 3000,
        b"ab" * 3000,
        "あ".encode() * 999,
    ]
    texts += [made_up_text(rng, rng.choice([10, 100, 3000])) for _ in range(max(60, int(megabytes * 60)))]
    size = megabytes * 1e6 - sum(map(len, texts))
    texts += source_texts(size)
    return texts


def bpe(alphabet=None, vocab_size=1500, special=(), **options):
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=alphabet or [],
        show_progress=False,
        limit_alphabet=600,
    )
    return models.BPE(**options), trainer


def make(model_and_trainer, sample, **parts):
    model, trainer = model_and_trainer
    tokenizer = Tokenizer(model)
    added = parts.pop("added", [])
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.train_from_iterator(sample, trainer)
    tokenizer.add_tokens([token for token in added if not token.special])
    tokenizer.add_special_tokens([token for token in added if token.special])
    return tokenizer


def template(token, tokenizer):
    return processors.TemplateProcessing(single=f"{token} $A", special_tokens=[(token, tokenizer.token_to_id(token))])


def added_tokens():
    yield AddedToken("<|im_start|>", special=True, normalized=False)
    yield AddedToken("[MASK]", special=True, lstrip=True, normalized=False)
    yield AddedToken("</s>", special=True, rstrip=True, normalized=False)
    yield AddedToken("foo", single_word=True, normalized=False)
    yield AddedToken("Foo", normalized=True)
    yield AddedToken("  ", normalized=False)
    yield AddedToken("a.b", normalized=True, lstrip=True, rstrip=True)
    yield AddedToken("fo", normalized=True, single_word=True)


def byte_level_tokenizers(sample):
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    byte_level = {"decoder": decoders.ByteLevel(), "post_processor": processors.ByteLevel(trim_offsets=False)}

    def split(*patterns):
        steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
        return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    for prefix in (False, True):
        yield f"gpt2_prefix_{prefix}", make(
            bpe(alphabet, special=["<|endoftext|>"]),
            sample,
            pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=prefix),
            **byte_level,
        )
    llama3 = make(bpe(alphabet, 3000, ["<s>"], ignore_merges=True), sample, pre_tokenizer=split(LLAMA3), **byte_level)
    llama3.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template("<s>", llama3)])
    yield "llama3", llama3
    yield "qwen2", make(
        bpe(alphabet, 2000),
        sample,
        normalizer=normalizers.NFC(),
        pre_tokenizer=split(QWEN2),
        added=added_tokens(),
        **byte_level,
    )
    yield "o200k", make(bpe(alphabet), sample, pre_tokenizer=split(O200K), **byte_level)
    yield "deepseek", make(bpe(alphabet), sample, pre_tokenizer=split(*DEEPSEEK), **byte_level)
    # Bytes that are not in the vocabulary: dropped, or unknown.
    some = sorted(alphabet)[:150]
    yield "few_bytes", make(bpe(some), sample[:20], pre_tokenizer=split(GPT2), **byte_level)
    yield "normalized_to_bytes", make(
        bpe(alphabet), sample, normalizer=normalizers.ByteLevel(), added=added_tokens(), decoder=decoders.ByteLevel()
    )
    yield "bytes_then_split", make(
        bpe(alphabet),
        sample,
        pre_tokenizer=pre_tokenizers.Sequence(
            [pre_tokenizers.ByteLevel(True), pre_tokenizers.Split("e", "merged_with_next")]
        ),
        **byte_level,
    )


def sentence_piece_tokenizers(sample):
    replace, fuse = decoders.Replace("▁", " "), decoders.Fuse()
    special = ["<unk>", "<s>", "</s>", *BYTES]
    options = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    llama2 = make(
        bpe(special=special, **options),
        [text[:300] for text in sample],
        normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        pre_tokenizer=pre_tokenizers.Metaspace("▁", "never"),
        decoder=decoders.Sequence([replace, decoders.ByteFallback(), fuse, decoders.Strip(" ", 1, 0)]),
    )
    # As Llama 2's: the text is one word. Trained so, tokens would have many.
    llama2.pre_tokenizer = pre_tokenizers.Sequence([])
    llama2.post_processor = template("<s>", llama2)
    yield "llama2", llama2
    yield "gemma", make(
        bpe(special=[*special, "\n\n", "▁▁", "▁▁▁▁"], **options),
        sample,
        normalizer=normalizers.Replace(" ", "▁"),
        pre_tokenizer=pre_tokenizers.Split(" ", "merged_with_previous"),
        decoder=decoders.Sequence([replace, decoders.ByteFallback(), fuse]),
        added=[AddedToken(f"<unused{i}>", special=False, normalized=False) for i in range(99)],
    )
    for scheme in ("first", "always", "never"):
        for split in (True, False):
            yield f"metaspace_{scheme}_{split}", make(
                bpe(special=special, **options),
                [text[:200] for text in sample],
                pre_tokenizer=pre_tokenizers.Metaspace("▁", scheme, split),
                normalizer=normalizers.Strip(left=True, right=False) if split else None,
                decoder=decoders.Metaspace("▁", scheme),
                added=added_tokens(),
            )
    for fuse_unk in (True, False):
        yield f"some_bytes_{fuse_unk}", make(
            bpe(special=["<unk>", *BYTES[:0xE8]], unk_token="<unk>", fuse_unk=fuse_unk, byte_fallback=True),
            sample[:5],
            normalizer=normalizers.Sequence(
                [normalizers.Replace(Regex(" {2,}|e+"), "▁"), normalizers.Replace("\n", "")]
            ),
            pre_tokenizer=pre_tokenizers.Metaspace("▁", "first"),
            decoder=decoders.Sequence([decoders.ByteFallback(), decoders.Strip("a", 2, 0), replace]),
        )


def other_tokenizers(sample):
    unknown = {"special": ["[UNK]", "[CLS]"], "unk_token": "[UNK]"}
    sequence = pre_tokenizers.Sequence
    yield "words", make(
        bpe(**unknown),
        sample,
        normalizer=normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase(), normalizers.StripAccents()]),
        pre_tokenizer=sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Digits(True)]),
        added=added_tokens(),
    )
    yield "strip", make(
        bpe(),
        sample,
        normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase(), normalizers.Strip()]),
        pre_tokenizer=sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Digits(False)]),
        decoder=decoders.Strip("e", 0, 1),
    )
    yield "nfkd", make(
        bpe(fuse_unk=True, **unknown), sample, normalizer=normalizers.NFKD(), pre_tokenizer=pre_tokenizers.Whitespace()
    )
    behaviors = ["removed", "isolated", "merged_with_previous", "merged_with_next", "contiguous"]
    for behavior in behaviors:
        for invert in (False, True):
            steps = [
                pre_tokenizers.Split(Regex(r"\s|[aeiou]+|\d"), behavior, invert),
                pre_tokenizers.Split("t", behavior, invert),
            ]
            # Its tokens know of no words, so that ids show where these end.
            tokenizer = make(bpe(vocab_size=900, **unknown), [text[:200] for text in sample[:60]])
            tokenizer.pre_tokenizer = sequence(steps)
            yield f"split_{behavior}_{invert}", tokenizer
    yield "word_class", make(
        bpe(**unknown),
        sample,
        pre_tokenizer=sequence([pre_tokenizers.Split(Regex(r"\w+|[^\w\S]+|[\S\d]"), "isolated")]),
    )


def with_legacy_merges(tokenizer):
    content = json.loads(tokenizer.to_str())
    content["model"]["merges"] = [" ".join(merge) for merge in content["model"]["merges"]]
    return json.dumps(content)


def write_length(file, value):
    file.write(struct.pack("<i", value))


def write_cases(path, tokenizer, texts):
    with open(path, "wb") as file:
        write_length(file, len(texts))
        # Encodings take a hundred times the memory of their text.
        for first in range(0, len(texts), 100):
            some = texts[first : first + 100]
            encodings = tokenizer.encode_batch([text.decode(errors="replace") for text in some])
            for i, (text, encoding) in enumerate(zip(some, encodings), first):
                decoded = tokenizer.decode(encoding.ids, skip_special_tokens=i % 2 == 1).encode()
                for content in (text, array.array("i", encoding.ids).tobytes(), decoded):
                    write_length(file, len(content))
                    file.write(content)


def main(folder, megabytes):
    texts = make_texts(megabytes)
    sample = [text.decode(errors="replace")[:2000] for text in texts[10:200]]
    sample = [text for text in sample if len(text) < 2000 or " " in text]
    all_tokenizers = [maker(sample) for maker in (byte_level_tokenizers, sentence_piece_tokenizers, other_tokenizers)]
    names = []
    for name, tokenizer in (pair for tokenizers in all_tokenizers for pair in tokenizers):
        path = os.path.join(folder, name)
        with open(path + ".json", "w", encoding="utf-8") as file:
            file.write(with_legacy_merges(tokenizer) if name == "gpt2_prefix_False" else tokenizer.to_str())
        vocab = sorted((token_id, token) for token, token_id in tokenizer.get_vocab().items())
        with open(path + ".vocab", "w", encoding="utf-8") as file:
            json.dump([[token_id, token, tokenizer.id_to_token(token_id)] for token_id, token in vocab], file)
        share = texts if megabytes > 10 and name in MODELS else texts[:10] + texts[10 + len(names) % 16 :: 16]
        write_cases(path + ".cases", Tokenizer.from_str(tokenizer.to_str()), share)
        names.append(name)
    with open(os.path.join(folder, "names"), "w", encoding="utf-8") as file:
        file.write("\n".join(names))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
