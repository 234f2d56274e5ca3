#pragma once
// A deep copy of a module that fully_shard or replicate was called on, for an exponential moving average, say.
//
//   Gpt average = clone_sharded(model);                       // its own shards, with the same values
//   for (...) {
//     train_step(model);
//     const torch::NoGradGuard no_grad;
//     for (size_t i = 0; i < shards.size(); ++i) averages[i].lerp_(shards[i], 0.001);    // DTensors, of parameters()
//   }
//   validate(average);                                        // gathers as the model does
//
// The copy has the same units on the same ranks, with the same options and requires_grad. Ties stay ties. It has no
// gradients, and the settings of fsdp_module.h are those of a new unit. No rank holds more than its shards at any time.
//
// Python's fully_shard refuses copy.deepcopy; nn/hooks/clone.h copies modules that are no units.

#include <torch/nn/module.h>

#include <memory>

namespace tessera {

/// Types are torch::nn::Cloneable, as nn/hooks/clone.h has it. Collective. Throws NotImplementedError, before it
/// copies, for a module that cannot be cloned, has hooks or state of others (activation checkpointing,
/// parallelize_module), or has a part of a unit of several modules, and StateError unless all units are between
/// iterations, on every rank.
std::shared_ptr<torch::nn::Module> clone_sharded(torch::nn::Module& module);

template <class Holder>
requires requires {
  typename Holder::ContainedType;
}
Holder clone_sharded(const Holder& module) {
  auto copy = clone_sharded(static_cast<torch::nn::Module&>(*module.ptr()));
  return Holder(std::dynamic_pointer_cast<typename Holder::ContainedType>(std::move(copy)));
}

}  // namespace tessera
