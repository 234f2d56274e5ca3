#pragma once
// Deep-copies a module with units, for example to keep an exponential moving average.
//
//   Gpt average = clone_sharded(model);                       // its own shards, with the same values
//
// The copy has the same units on the same ranks, with the same options, requires_grad and ties. It has no gradients,
// and FSDPModule settings start from their defaults. Python's fully_shard refuses copy.deepcopy; nn/hooks/clone.h
// copies modules without units.

#include <torch/nn/module.h>

#include <memory>

namespace tessera {

/// Clones a module of torch::nn::Cloneable types. Collective. Throws, before copying:
/// - NotImplementedError if the module cannot be cloned, has hooks from activation checkpointing or parallelize_module,
///   or contains only part of a unit of several modules.
/// - StateError, on every rank, unless all units are between iterations.
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
