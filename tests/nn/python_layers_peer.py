"""Runs torch.nn's layers on what C++ has written, and compares each result bit by bit with the one from there."""

import sys
import warnings

import torch

warnings.simplefilter("ignore")


def tensors_of(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for element in value if element is not None for tensor in tensors_of(element)]


@torch.no_grad()
def difference(case):
    inputs = case["inputs"]
    layer = eval(case["layer"], {"nn": torch.nn}).to(case["dtype_of"].dtype).eval()
    layer.load_state_dict(case["state"])
    try:
        results = tensors_of(layer(*inputs))
    except RuntimeError as error:
        return None if case["refused"] else f"{case['layer']} in {case['dtype_of'].dtype}: {error}"
    if len(results) != len(case["results"]):
        return f"{case['layer']} in {case['dtype_of'].dtype}: {len(case['results'])} results, not {len(results)}"
    for tensor, expected, name in zip(results, case["results"], ("first", "second", "third")):
        if not torch.equal(tensor, expected):
            worst = (tensor.double() - expected.double()).abs().max().item()
            return f"{case['layer']} in {case['dtype_of'].dtype}: the {name} result differs by {worst}"
    return None


cases = torch.load(sys.argv[1], weights_only=False)
differences = list(filter(None, map(difference, cases)))
print("\n".join(differences + [f"{len(cases)} layers compared"]))
sys.exit(1 if differences else 0)
