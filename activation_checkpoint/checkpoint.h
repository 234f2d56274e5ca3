#pragma once
// Activation checkpointing: backward recomputes a region's activations, so that forward keeps only its inputs.
//
//   at::Tensor y = checkpoint([&](at::Tensor x) { return block->forward(x); }, x);  // one call
//   checkpoint_module(*block);                                                      // all calls of a module
//   apply_activation_checkpointing(*model, [](const std::string&, torch::nn::Module& module) {
//     return dynamic_cast<BlockImpl*>(&module) != nullptr;                          // many modules
//   });
//
// Call it between parallelize_module and fully_shard. Regions may nest, and must compute the same results when rerun;
// docs/semantics.md covers random numbers and side effects. Results are bit-equal to those without checkpointing.
// Thread safety: one thread per rank; backward may run in autograd's threads.
// Source: torch.utils.checkpoint (use_reentrant=False) and torch.distributed.algorithms._checkpoint.

#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "activation_checkpoint/checkpoint_options.h"
#include "nn/hooks/module_ref.h"
#include "nn/hooks/recomputable_call.h"

namespace tessera {

namespace detail {
void run_checkpointed(const std::function<void()>& forward, std::unique_ptr<RecomputableCall> again,
                      const CheckpointOptions& options);
}  // namespace detail

/// Calls `function(args...)` as a checkpointed region and returns its result. Copies both (tensors by handle).
/// Variables that `function` captures by reference must outlive backward. Arguments that contain pointers or views do
/// not compile. Throws NotImplementedError for arguments that share tensors in other ways, and for random numbers of
/// plain tensors if ranks are threads. Backward throws StateError if the second forward differs from the first.
template <class Function, class... Args>
auto checkpoint(const CheckpointOptions& options, Function function, Args... args) {
  using Result = std::invoke_result_t<Function&, Args&&...>;
  auto again = std::make_unique<RepeatableFunction<Function, Args...>>(function, args...);
  if constexpr (std::is_void_v<Result>) {
    detail::run_checkpointed([&] { function(std::move(args)...); }, std::move(again), options);
  } else {
    std::optional<Result> result;
    detail::run_checkpointed([&] { result.emplace(function(std::move(args)...)); }, std::move(again), options);
    return std::move(result).value();
  }
}

template <class Function, class... Args>
requires(!std::is_same_v<Function, CheckpointOptions>) auto checkpoint(Function function, Args... args) {
  return checkpoint(CheckpointOptions(), std::move(function), std::move(args)...);
}

/// Makes every call of `module`'s forward a checkpointed region, inside its hooks. Throws StateError without a hook
/// point or if already checkpointed. Calls throw NotImplementedError for arguments that contain pointers or views, or
/// share tensors in other ways.
void checkpoint_module(ModuleRef module, const CheckpointOptions& options = {});

/// Selects modules by their name below the root ("" for the root itself).
using CheckpointPolicy = std::function<bool(const std::string& name, torch::nn::Module& module)>;

/// Calls checkpoint_module on all modules that `policy` selects, and returns their number. Throws like it, before any
/// change, and ValueError if none is selected.
int64_t apply_activation_checkpointing(ModuleRef module, const CheckpointPolicy& policy,
                                       const CheckpointOptions& options = {});

}  // namespace tessera
