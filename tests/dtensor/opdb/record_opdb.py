"""Records a corpus for opdb_replay (opdb_corpus.h): the ATen calls below autograd that the sample inputs of PyTorch's
operator database make, forward, backward and in place, in the --dtypes (float32, int64 and bool), with their results on
plain tensors.

  PYTHON tests/dtensor/opdb/record_opdb.py CORPUS [--per-overload N] [--samples N] [--sizes S M L] [--seed SEED]
                                             [--dtypes DTYPE ...]

PYTHON has PyTorch, such as the build's own, $(./bazelw info output_base)/external/peer_python/python. --sizes are the
database's (5, 10 and 20 there); small ones leave more shards empty. Calls that draw random numbers, whose results are
undefined, or whose tensors have more than 4,096 elements are left out. Operators are sampled, and calls
replayed, in child processes, since some kernels do not survive what they are given.
"""

import argparse
import collections
import gc
import itertools
import os
import pickle
import random
import sys
import tempfile
import warnings

import torch
from torch.testing._internal import common_methods_invocations as database
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MAX_ELEMENTS = 4096
BATCH = 20  # of operators, or overloads, in one process
DROPPED_ARGUMENTS = ("device", "generator", "pin_memory")
UNDEFINED = ("empty", "resize", "set_")
SIZES = (database.S, database.M, database.L)
# Whose samples' lengths add up to the database's sizes: the kernel does not check, and reads what lies behind others.
OF_ITS_SIZES = ("_segment_reduce",)

# The numbers by which c10 and so opdb_corpus.h know them.
SCALAR_TYPES = {dtype: number for number, dtype in (
    (0, torch.uint8), (1, torch.int8), (2, torch.int16), (3, torch.int32), (4, torch.int64), (5, torch.float16),
    (6, torch.float32), (7, torch.float64), (9, torch.complex64), (10, torch.complex128), (11, torch.bool),
    (15, torch.bfloat16))}
MEMORY_FORMATS = {torch.contiguous_format: 0, torch.preserve_format: 1, torch.channels_last: 2,
                  torch.channels_last_3d: 3}


class NotRecorded(Exception):
    """A value that a corpus does not hold."""


def encode(value):
    if isinstance(value, torch.Tensor):
        if value.dtype not in SCALAR_TYPES or value.layout != torch.strided or value.is_neg() or value.is_conj():
            raise NotRecorded
        return value.detach().clone(memory_format=torch.contiguous_format)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.dtype) and value in SCALAR_TYPES:
        return SCALAR_TYPES[value]
    if isinstance(value, torch.memory_format):
        return MEMORY_FORMATS[value]
    if value is torch.strided:
        return 0
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    raise NotRecorded


def form(value):
    """What makes two calls the same case: sizes, dtypes and scalars."""
    if isinstance(value, torch.Tensor):
        return ("tensor", tuple(value.shape), value.dtype)
    if isinstance(value, (list, tuple)):
        return tuple(form(item) for item in value)
    return repr(value)


def tensors_in(*values):
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


class Call:
    """An op and its arguments, encoded."""

    def __init__(self, op, args, kwargs):
        self.name = op._schema.name
        self.overload = "" if op._overloadname == "default" else op._overloadname
        self.args = tuple(encode(value) for value in args)
        self.kwargs = {key: encode(value) for key, value in kwargs.items()}

    @property
    def op(self):
        return getattr(getattr(torch.ops.aten, self.name.split("::")[1]), self.overload or "default")

    def key(self):
        return (self.name, self.overload, form(self.args), form(list(self.kwargs.items())))

    def run(self):
        """The results, and what the tensor arguments hold after the call."""
        types = {argument.name: str(argument.real_type) for argument in self.op._schema.arguments}
        written = []

        def decode(value, name):
            if isinstance(value, torch.Tensor):
                written.append(value.clone())
                return written[-1]
            if isinstance(value, (list, tuple)):
                return [decode(item, name) for item in value]
            for kind, numbers in (("ScalarType", SCALAR_TYPES), ("MemoryFormat", MEMORY_FORMATS)):
                if value is not None and kind in types[name]:
                    return next(decoded for decoded, number in numbers.items() if number == value)
            return torch.strided if value is not None and "Layout" in types[name] else value

        args = [decode(value, name) for value, name in zip(self.args, types)]
        kwargs = {key: decode(value, key) for key, value in self.kwargs.items()}
        with torch.no_grad():
            result = self.op(*args, **kwargs)
        results = [encode(value) for value in flat(result)]
        return results, [encode(tensor) for tensor in written]


def flat(result):
    if not isinstance(result, (list, tuple)):
        return [result]
    return [item for value in result for item in (value if isinstance(value, (list, tuple)) else [value])]


class CallRecorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self._record(op, args, {key: value for key, value in kwargs.items() if key not in DROPPED_ARGUMENTS})
        return op(*args, **kwargs)

    def _record(self, op, args, kwargs):
        tensors = tensors_in(args, kwargs)
        is_random = torch.Tag.nondeterministic_seeded in op.tags
        if op.namespace != "aten" or is_random or any(part in op._schema.name for part in UNDEFINED):
            return
        if not tensors or sum(tensor.numel() for tensor in tensors) > MAX_ELEMENTS:
            return
        if len({id(tensor) for tensor in tensors}) < len(tensors):
            return
        try:
            call = Call(op, args, kwargs)
        except NotRecorded:
            return
        self.calls.setdefault(call.key(), call)


def call_with_gradients(function, sample, recorder):
    with recorder:
        result = function(sample.input, *sample.args, **sample.kwargs)
        outputs = [tensor for tensor in tensors_in(result) if tensor.requires_grad]
        inputs = [tensor for tensor in tensors_in(sample.input, sample.args, sample.kwargs) if tensor.requires_grad]
        if outputs and inputs:
            torch.autograd.grad(outputs, inputs, [torch.randn_like(output) for output in outputs], allow_unused=True)


def call_in_place(function, sample, recorder):
    written = [tensor.detach().clone() for tensor in tensors_in(sample.input)]
    with torch.no_grad(), recorder:
        function(written[0] if isinstance(sample.input, torch.Tensor) else written, *sample.args, **sample.kwargs)


def samples_of(operator, dtype, count, failed):
    """At most `count`; fewer, and the operator in `failed`, where the database raises, as it does for some sizes."""
    needs_grad = operator.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    try:
        yield from itertools.islice(operator.sample_inputs("cpu", dtype, requires_grad=needs_grad), count)
    except Exception:  # noqa: BLE001
        failed.add(operator.name)


def sampled_calls(operator, options):
    """The calls, and the operators of which samples are missing."""
    torch.manual_seed(options.seed)
    recorder = CallRecorder()
    failed = set()
    for dtype in (getattr(torch, name) for name in options.dtypes):
        if dtype not in operator.supported_dtypes("cpu"):
            continue
        for sample in samples_of(operator, dtype, options.samples, failed):
            for call, function in ((call_with_gradients, operator.op), (call_in_place, operator.inplace_variant)):
                try:
                    if function:
                        call(function, sample, recorder)
                except Exception:  # noqa: BLE001 - not every sample is for every variant
                    pass
    return list(recorder.calls.values()), failed


def is_same(a, b):
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return type(a) is type(b) and (a == b or a != a)
    return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())


def case_of(call):
    """The call and what came of it, or None if that is not the same each time."""
    before = tensors_in(call.args, call.kwargs)
    runs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        try:
            runs.append(call.run())
        except (NotRecorded, RuntimeError, IndexError, NotImplementedError, ValueError, TypeError):
            return None
    (results, after), (again, _) = runs
    elements = sum(tensor.numel() for tensor in tensors_in(results, before))
    if elements > MAX_ELEMENTS or len(results) != len(again) or not all(map(is_same, results, again)):
        return None
    mutated = [i for i, tensor in enumerate(before) if not is_same(tensor, after[i])]
    return {"op": call.name, "overload": call.overload, "args": call.args, "kwargs": call.kwargs, "out": results,
            "mutated": mutated, "mutated_out": [after[i] for i in mutated], "check": "value"}


def tensor_from(elements, dtype, shape):
    return torch.frombuffer(bytearray(elements), dtype=dtype).reshape(shape) if elements else torch.empty(shape, dtype=dtype)


class Pickler(pickle.Pickler):
    """Writes a tensor as its elements: torch's own way makes an archive of each, which took half of the time."""

    def reducer_override(self, value):
        if type(value) is not torch.Tensor:
            return NotImplemented
        elements = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return tensor_from, (elements, value.dtype, value.shape)


def in_child(function, items):
    """[function(item) for each item] from a process of their own, or None if that died."""
    with tempfile.TemporaryFile() as file:
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
            with open(file.fileno(), "wb", closefd=False) as out:
                Pickler(out).dump([function(item) for item in items])
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        file.seek(0)
        return pickle.load(file) if status == 0 else None


def in_children(function, items):
    """function(item) for each item, None where that killed its process."""
    for first in range(0, len(items), BATCH):
        batch = items[first:first + BATCH]
        yield from in_child(function, batch) or ((in_child(function, [item]) or [None])[0] for item in batch)


def choose(calls, count, chooser):
    """At most `count` calls of each overload."""
    by_overload = collections.defaultdict(list)
    for call in calls.values():
        by_overload[call.name, call.overload].append(call)
    return [chooser.sample(each, min(count, len(each))) for _, each in sorted(by_overload.items())]


def record(options):
    gc.freeze()  # so that no child looks through what is imported
    calls, failed, died = {}, set(), []
    has_its_sizes = tuple(options.sizes) == SIZES
    operators = [operator for operator in database.op_db if has_its_sizes or operator.name not in OF_ITS_SIZES]
    sampled = in_children(lambda operator: sampled_calls(operator, options), operators)
    for operator, result in zip(operators, sampled):
        if result is None:
            died.append(operator.name)
            continue
        for call in result[0]:
            calls.setdefault(call.key(), call)
        failed |= result[1]
    chosen = choose(calls, options.per_overload, random.Random(options.seed))
    cases = []
    for each, own in zip(chosen, in_children(lambda each: [case_of(call) for call in each], chosen)):
        if own is None:
            died.append(each[0].name)
        for number, case in enumerate(filter(None, own or ())):
            overload = case["op"] + ("." + case["overload"] if case["overload"] else "")
            cases.append({"id": f"{overload}#{number}", **case})
    torch.save(cases, options.corpus)
    overloads = len({(case["op"], case["overload"]) for case in cases})
    print(f"{len(cases)} cases of {overloads} overloads")
    for what, names in ("samples failed", sorted(failed)), ("kernels crashed", died):
        if names:
            print(f"{what}: {' '.join(names)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus")
    parser.add_argument("--per-overload", type=int, default=12, help="cases, at most")
    parser.add_argument("--samples", type=int, default=200, help="of an operator and dtype, at most")
    parser.add_argument("--sizes", type=int, nargs=3, default=SIZES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtypes", nargs="+", default=("float32", "int64", "bool"), metavar="DTYPE",
                        choices=[str(dtype).removeprefix("torch.") for dtype in SCALAR_TYPES])
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    # The database seeds for each sample. torch.manual_seed() seeds accelerators too, and for those that are not in use it
    # formats the stack of the call, which took half of the time.
    torch.manual_seed = torch.random.manual_seed = torch.default_generator.manual_seed
    for module in list(sys.modules.values()):
        if module.__name__.startswith("torch.testing._internal"):
            for name, size in zip("SML", options.sizes):
                if isinstance(getattr(module, name, None), int):
                    setattr(module, name, size)
    record(options)


if __name__ == "__main__":
    main()
