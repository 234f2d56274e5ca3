"""Python's `tokenizers` on the texts of tokenizer.cpp, of which it makes the tokenizers too.

tokenizer_peer.py make <folder> <megabytes>              writes texts (lengths, then bytes) and <name>.json
tokenizer_peer.py measure <folder> <name> <threads>      prints "name value": MB/s of the first pass, its better way
"""

import importlib.util
import os
import random
import struct
import sys
import sysconfig
import time

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
VOCAB_SIZE = 32000


def source_texts(size):
    """The first 16 KB of Python's and torch's sources, files in an order that depends on nothing else."""
    folders = [sysconfig.get_path("stdlib"), *importlib.util.find_spec("torch").submodule_search_locations]
    files = [os.path.join(parent, name) for folder in folders for parent, _, names in os.walk(folder) for name in names]
    files = sorted(file for file in files if file.endswith((".py", ".h", ".pyi", ".txt", ".rst")))
    random.Random(7).shuffle(files)
    for file in files:
        if size <= 0:
            break
        with open(file, "rb") as opened:
            text = opened.read(16384).decode(errors="replace")
        size -= len(text)
        yield text


def make_tokenizers(texts):
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

    def train(pre_tokenizer, normalizer=None, special=(), alphabet=(), **options):
        tokenizer = Tokenizer(models.BPE(**options))
        tokenizer.pre_tokenizer = pre_tokenizer
        if normalizer:
            tokenizer.normalizer = normalizer
        trainer = trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE, special_tokens=list(special), initial_alphabet=list(alphabet), show_progress=False
        )
        tokenizer.train_from_iterator(texts, trainer)
        return tokenizer

    def split(pattern):
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
        )

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    yield "gpt2", train(pre_tokenizers.ByteLevel(False), alphabet=alphabet)
    yield "llama3", train(split(LLAMA3), alphabet=alphabet, ignore_merges=True)
    yield "qwen2", train(split(QWEN2), normalizers.NFC(), alphabet=alphabet)
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    llama2 = train(
        pre_tokenizers.Metaspace("▁", "never"),
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        special=special,
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    # As in Llama 2's file, which has no pre-tokenizer.
    llama2.pre_tokenizer = pre_tokenizers.Sequence([])
    yield "llama2", llama2


def make(folder, megabytes):
    texts = list(source_texts(megabytes * 1e6))
    with open(os.path.join(folder, "texts"), "wb") as file:
        for text in texts:
            content = text.encode()
            file.write(struct.pack("<i", len(content)) + content)
    for name, tokenizer in make_tokenizers(texts):
        tokenizer.save(os.path.join(folder, name + ".json"))
        print(name, tokenizer.get_vocab_size())


def read_texts(folder):
    with open(os.path.join(folder, "texts"), "rb") as file:
        while header := file.read(4):
            yield file.read(struct.unpack("<i", header)[0]).decode()


def measure(folder, name):
    from tokenizers import Tokenizer

    texts = list(read_texts(folder))
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    seconds = {}
    for way in ("encode_batch", "encode_batch_fast"):
        # Each a tokenizer of its own, that has seen no word.
        encode = getattr(Tokenizer.from_file(os.path.join(folder, name + ".json")), way)
        start = time.perf_counter()
        encodings = encode(texts)
        seconds[way] = time.perf_counter() - start
    print("speed", megabytes / min(seconds.values()))
    print("ids", sum(len(encoding.ids) for encoding in encodings))


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(sys.argv[2], float(sys.argv[3]))
    else:
        # Read once, when the threads start.
        os.environ.update(RAYON_NUM_THREADS=sys.argv[4], TOKENIZERS_PARALLELISM="true")
        measure(sys.argv[2], sys.argv[3])
