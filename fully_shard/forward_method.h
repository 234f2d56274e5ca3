#pragma once
// An entry point of a module beside forward: register_fsdp_forward_method in PyTorch.
//
//   at::Tensor encode(at::Tensor image) {
//     return forward_method(*this, [this](at::Tensor x) { return trunk(x); }, image);
//   }
//
// Calls may nest. In a module without hooks it is a plain call. Thread safety: as calls of forward.

#include <torch/nn/module.h>

#include <type_traits>
#include <utility>

#include "nn/hooks/run_with_hooks.h"

namespace tessera {

/// Calls `method(args...)` under all hooks of the module's forward, which see the tensors among arguments and result.
template <class Method, class... Args>
std::invoke_result_t<Method&, Args&&...> forward_method(torch::nn::Module& module, Method method, Args... args) {
  using Result = std::invoke_result_t<Method&, Args&&...>;
  if (auto* point = find_hook_point(module)) {
    return run_with_hooks<Result, Args...>(*point, method, std::move(args)...);
  }
  return method(std::move(args)...);
}

}  // namespace tessera
