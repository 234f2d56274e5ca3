#pragma once
// A deep copy of a module with units, such as one for an exponential moving average.
//
//   Gpt average = clone_sharded(model);                       // its own shards, with the same values
//
// The copy has the same units on the same ranks, with the same options, requires_grad and ties, but no gradients, and
// the settings of new units. Python's fully_shard refuses copy.deepcopy; nn/hooks/clone.h copies modules without units.

#include <torch/nn/module.h>

#include <memory>

namespace tessera {

/// Clones a module of torch::nn::Cloneable types. Collective. Throws NotImplementedError, before it copies, for a
/// module that cannot be cloned, has hooks of others (activation checkpointing, parallelize_module), or has a part of a
/// unit of several modules, and StateError, on every rank, unless all units are between iterations.
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
