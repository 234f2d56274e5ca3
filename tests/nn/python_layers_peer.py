"""Runs torch.nn's layers on what C++ has written, and compares results and gradients with its own, bit by bit."""

import sys
import warnings

import torch

warnings.simplefilter("ignore")


def tensors_of(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for element in value if element is not None for tensor in tensors_of(element)]


def run(case):
    """Results, and gradients by name."""
    inputs = [x.detach().requires_grad_(x.is_floating_point()) for x in case["inputs"]]
    layer = eval(case["layer"], {"nn": torch.nn}).to(case["dtype_of"].dtype).train(case["train"])
    layer.load_state_dict(case["state"])
    torch.manual_seed(case["seed"])
    results = tensors_of(eval(case["call"], {"layer": layer, "x": inputs}))
    result_grads = case["result_grads"] or map(torch.zeros_like, results)  # none where C++ has refused
    differentiable = [(result, grad) for result, grad in zip(results, result_grads) if result.requires_grad]
    torch.autograd.backward(*zip(*differentiable))
    named = [(str(i), x) for i, x in enumerate(inputs)] + list(layer.named_parameters())
    return results, {name: tensor.grad for name, tensor in named if tensor.grad is not None}


def difference(case):
    what = f"{case['layer']}, {case['call']}, in {case['dtype_of'].dtype}, {'train' if case['train'] else 'eval'}"
    try:
        results, grads = run(case)
    except RuntimeError as error:
        return None if case["refused"] else f"{what}: {error}"
    if case["refused"]:
        return f"{what}: refused in C++"
    if len(results) != len(case["results"]) or grads.keys() != case["grads"].keys():
        names = f"{list(case['grads'])}, not {list(grads)}"
        return f"{what}: {len(case['results'])} results, not {len(results)}; gradients of {names}"
    pairs = [(f"result {i}", own, theirs) for i, (own, theirs) in enumerate(zip(results, case["results"]))]
    pairs += [(f"gradient of {name}", own, case["grads"][name]) for name, own in grads.items()]
    faults = []
    for name, own, theirs in pairs:
        if not torch.equal(own, theirs):
            worst = (own.double() - theirs.double()).abs().max().item()
            faults.append(f"the {name} differs by {worst}, of {own.double().abs().max().item()}")
    return f"{what}: {'; '.join(faults)}" if faults else None


cases = torch.load(sys.argv[1], weights_only=False)
differences = list(filter(None, map(difference, cases)))
print("\n".join(differences + [f"{len(cases)} layers compared"]))
sys.exit(1 if differences else 0)
