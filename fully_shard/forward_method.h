#pragma once
// Runs a method other than forward with the module's hooks, like register_fsdp_forward_method in PyTorch.
//
//   at::Tensor encode(at::Tensor image) {
//     return forward_method(*this, [this](at::Tensor x) { return trunk(x); }, image);
//   }
//
// Calls may nest. For a module without hooks, this is a plain call. Thread safety: the same as for forward.

#include <torch/nn/module.h>

#include <type_traits>
#include <utility>

#include "nn/hooks/run_with_hooks.h"

namespace tessera {

/// Calls `method(args...)` with all forward hooks of the module. The hooks see the tensors in arguments and result.
template <class Method, class... Args>
std::invoke_result_t<Method&, Args&&...> forward_method(torch::nn::Module& module, Method method, Args... args) {
  using Result = std::invoke_result_t<Method&, Args&&...>;
  if (auto* point = find_hook_point(module)) {
    return run_with_hooks<Result, Args...>(*point, method, std::move(args)...);
  }
  return method(std::move(args)...);
}

}  // namespace tessera
