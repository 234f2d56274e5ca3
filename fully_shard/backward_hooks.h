#pragma once
// Where a unit hooks into autograd.
//
// An identity node on the outputs of forward runs when the backward reaches the unit; one on its inputs runs
// when the backward leaves it, after the gradients of everything in between. Nodes rather than tensor hooks,
// because a hook is lost when its tensor is a view that is later changed in place (pytorch issue 181832).
// They are made of detached aliases, not views, so in-place ops on a unit's output keep working.
//
// Source of the idea: RegisterPostBackwardFunction in torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py.

#include <ATen/core/Tensor.h>

#include <functional>
#include <span>

namespace tessera {

/// Replaces the tensors that need a gradient by aliases behind one identity node; `callback` runs in backward
/// when the gradients of all of them (that the backward computes) are there. Returns false, and does
/// nothing, if no tensor needs a gradient or grad mode is off.
bool insert_backward_node(std::span<at::Tensor* const> tensors, std::function<void()> callback);

/// Calls `callback` in backward each time the gradient of `param` is complete. Replaces an earlier one.
void set_post_accumulate_grad_hook(const at::Tensor& param, std::function<void()> callback);

/// Calls `callback` at the end of the running backward. Only inside a backward.
void at_end_of_backward(std::function<void()> callback);

/// An id of the running backward; -1 outside of one.
int64_t current_backward();

}  // namespace tessera
