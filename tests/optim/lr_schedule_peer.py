"""Learning rates of transformers' schedules, for lr_schedule_test.cpp.

lr_schedule_peer.py <file>: writes a line for each schedule: its name, then the rates of two parameter groups in each
step, step by step.
"""

import sys

import torch
from transformers import optimization

BASE_LRS = [0.5, 3e-4]


def rates(make, steps):
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in BASE_LRS]
    optimizer = torch.optim.SGD(groups)
    schedule = make(optimizer)
    result = []
    for _ in range(steps):
        result += schedule.get_last_lr()
        optimizer.step()
        schedule.step()
    return result


def schedules():
    """(name, function of an optimizer, steps to compare)"""
    o = optimization
    yield "constant", lambda opt: o.get_constant_schedule_with_warmup(opt, 7), 20
    yield "constant_at_once", lambda opt: o.get_constant_schedule(opt), 5
    yield "linear", lambda opt: o.get_linear_schedule_with_warmup(opt, 7, 40), 50
    yield "linear_at_once", lambda opt: o.get_linear_schedule_with_warmup(opt, 0, 13), 15
    # The cosine of transformers rises again after the last step.
    yield "cosine", lambda opt: o.get_cosine_schedule_with_warmup(opt, 11, 103), 104
    yield "cosine_min", lambda opt: o.get_cosine_with_min_lr_schedule_with_warmup(opt, 3, 30, min_lr_rate=0.1), 31
    yield "inverse_sqrt", lambda opt: o.get_inverse_sqrt_schedule(opt, 9), 60
    yield "inverse_sqrt_timescale", lambda opt: o.get_inverse_sqrt_schedule(opt, 9, 31), 60
    yield "inverse_sqrt_at_once", lambda opt: o.get_inverse_sqrt_schedule(opt, 0), 60
    for decay in "linear", "cosine", "1-sqrt":
        yield f"wsd_{decay}", lambda opt, decay=decay: o.get_wsd_schedule(
            opt, num_warmup_steps=5, num_decay_steps=17, num_stable_steps=8, decay_type=decay, min_lr_ratio=0.05
        ), 40
    yield "wsd_of_total", lambda opt: o.get_wsd_schedule(
        opt, num_warmup_steps=5, num_decay_steps=17, num_training_steps=50
    ), 60


def main(path):
    with open(path, "w", encoding="ascii") as file:
        for name, make, steps in schedules():
            print(name, *(repr(float(rate)) for rate in rates(make, steps)), file=file)


if __name__ == "__main__":
    main(*sys.argv[1:])
