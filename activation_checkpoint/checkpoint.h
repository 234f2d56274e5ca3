#pragma once
// Activation checkpointing: forward keeps only the inputs of a region; backward computes the region again to get at
// what its own ops need. Costs one more forward, saves the memory of all activations inside.
//
//   at::Tensor y = checkpoint([&](at::Tensor x) { return block->forward(x); }, x);     // one call
//
//   checkpoint_module(*block);                                                           // every call of a module
//   apply_activation_checkpointing(*model, [](const std::string& name, torch::nn::Module& module) {
//     return dynamic_cast<BlockImpl*>(&module) != nullptr;                               // of many modules
//   });
//
// With sharding the order is: tensor-parallel plans, then checkpointing, then fully_shard. A unit's parameters are then
// gathered once for its backward, which recomputes and differentiates with them. Activations may be DTensors. Regions
// may be nested, have any number of inputs and outputs, and be called several times.
//
// Results of some ops can be kept, if computing them costs more than keeping them: see saved_ops.h.
//
// A region must compute the same when it is called again. Random numbers are drawn again from the same state, of
// libtorch's default generators, of DTensors, and of at::Generators among the arguments. What the function writes (a
// counter, running statistics) is written twice. An input changed in place after forward is an error in backward, as
// for any op.
//
// Values: bit-equal to those without checkpointing, where the ops themselves are deterministic.
//
// After torch.utils.checkpoint (use_reentrant=False) and torch.distributed.algorithms._checkpoint. Double backward
// works through it, as through the ops themselves.
//
// Thread safety: one thread a rank; backward may run in other threads of autograd.

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

/// Calls `function(args...)` as a checkpointed region and returns its result. `function` and the arguments are copied
/// (tensors by handle); what `function` captures by reference must live until backward. Without grad mode it is a
/// plain call.
/// An argument that is or contains a pointer or view does not compile. Throws NotImplementedError for one that reaches
/// tensors of the caller otherwise (a shared_ptr in a class of its own), and where ranks are threads and the region
/// draws random numbers for plain tensors, which all ranks' threads draw from one generator; backward throws StateError
/// if the second forward is not like the first.
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

/// Makes every call of `module`'s forward a checkpointed region, inside of the module's hooks: what fully_shard or a
/// tensor-parallel style does before and after forward is done once.
/// Throws StateError if the module's type has no hook point, or it is checkpointed already. A call throws
/// NotImplementedError if forward takes an argument that is or contains a pointer or view, or that reaches tensors of
/// the caller otherwise.
void checkpoint_module(ModuleRef module, const CheckpointOptions& options = {});

/// Which modules to checkpoint, by name below the root ("" for itself).
using CheckpointPolicy = std::function<bool(const std::string& name, torch::nn::Module& module)>;

/// checkpoint_module on `module` and all below it for which `policy` says true; returns how many. A module that is
/// there under two names is asked about once. Throws as checkpoint_module, before any module is changed, and ValueError
/// if the policy chooses none.
int64_t apply_activation_checkpointing(ModuleRef module, const CheckpointPolicy& policy,
                                       const CheckpointOptions& options = {});

}  // namespace tessera
