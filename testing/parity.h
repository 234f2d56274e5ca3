#pragma once
// Is a sharded model still the model? Compares it with an unsharded one, parameter by parameter.
//
//   train(reference, whole_batch);                 // plain, the same on every rank
//   train(sharded, batch_of_this_rank);            // after fully_shard
//   check_sharded_parity(*reference, *sharded);    // names, values and gradients of this rank's rows
//
// After check_sharded_parity in torch/testing/_internal/common_fsdp.py, with two differences: the number of
// parameters is compared too (a missing tail is found), and each rank compares with its own reference, so it
// needs no communication and replicas that differ between ranks are found.

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <string>
#include <vector>

#include "testing/tensor_matchers.h"

namespace tessera {

struct ParityOptions {
  /// Taken out of the sharded module's parameter names wherever they occur, as wrappers add them.
  std::vector<std::string> prefixes_to_ignore = {};
  Tolerance tolerance = {};
  /// Compare gradients too: both undefined, or equal. Their atol is the tolerance's times the largest number among all
  /// gradients of the reference, where that is below 1: else gradients of 1e-6 would be equal to zeros.
  bool gradients = true;
  /// Compare parameters that are plain tensors whole, as those of layers that a tensor-parallel plan left alone, where
  /// nothing shards the rest. Without, one is an error, since a unit is missing, as a rule.
  bool allow_plain = false;
};

/// Throws ExpectationError naming the first parameter that differs: its name, that it is no DTensor, its device, its
/// local tensor or its gradient; or that is not finite in the reference, whose comparison would say nothing.
/// `reference` holds plain parameters. No communication unless a parameter or gradient is Partial: then it is reduced,
/// for which all ranks of its mesh call this.
void check_sharded_parity(const torch::nn::Module& reference, const torch::nn::Module& sharded,
                          const ParityOptions& options = {});

/// Either may be a module or a ModuleHolder.
template <class A, class B>
void check_sharded_parity(const torch::nn::ModuleHolder<A>& reference, const torch::nn::ModuleHolder<B>& sharded,
                          const ParityOptions& options = {}) {
  check_sharded_parity(static_cast<const torch::nn::Module&>(*reference.ptr()),
                       static_cast<const torch::nn::Module&>(*sharded.ptr()), options);
}
template <class A>
void check_sharded_parity(const torch::nn::ModuleHolder<A>& reference, const torch::nn::Module& sharded,
                          const ParityOptions& options = {}) {
  check_sharded_parity(static_cast<const torch::nn::Module&>(*reference.ptr()), sharded, options);
}
template <class B>
void check_sharded_parity(const torch::nn::Module& reference, const torch::nn::ModuleHolder<B>& sharded,
                          const ParityOptions& options = {}) {
  check_sharded_parity(reference, static_cast<const torch::nn::Module&>(*sharded.ptr()), options);
}

}  // namespace tessera
