#pragma once
// A module's entry point beside forward, under fully_shard. What register_fsdp_forward_method is in PyTorch: parameters
// are gathered by the hooks of a call of forward, so another method must say that it is such a call too.
//
//   struct VisionModelImpl : torch::nn::Module {
//     at::Tensor forward(at::Tensor image) { return head(encode(image)); }
//     at::Tensor encode(at::Tensor image) {
//       return forward_method(*this, [this](at::Tensor x) { return trunk(x); }, image);
//     }
//   };
//   TESSERA_MODULE(VisionModel);
//
// Calls may nest, as forward calls encode here. In a module without hooks, and of a type that has none, it is a plain
// call.
//
// Thread safety: as calls of forward.

#include <torch/nn/module.h>

#include <type_traits>
#include <utility>

#include "nn/hooks/run_with_hooks.h"

namespace tessera {

/// Calls `method(args...)` as a call of the forward of `module`: under all of its hooks, which see the tensors among
/// the arguments and in the result.
template <class Method, class... Args>
std::invoke_result_t<Method&, Args&&...> forward_method(torch::nn::Module& module, Method method, Args... args) {
  using Result = std::invoke_result_t<Method&, Args&&...>;
  if (auto* point = find_hook_point(module)) {
    return run_with_hooks<Result, Args...>(*point, method, std::move(args)...);
  }
  return method(std::move(args)...);
}

}  // namespace tessera
