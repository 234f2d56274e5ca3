#pragma once
// Compares a sharded model with an unsharded one: names, values and gradients of this rank's parameters. Unlike its
// source, torch/testing/_internal/common_fsdp.py, it compares the number of parameters and sends nothing but Partials.

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <string>
#include <vector>

#include "testing/tensor_matchers.h"

namespace tessera {

struct ParityOptions {
  /// Prefixes to remove from the sharded module's parameter names, as wrappers add them.
  std::vector<std::string> prefixes_to_ignore = {};
  Tolerance tolerance = {};
  /// Compares gradients too. Their atol is scaled by the largest reference gradient if that is below 1.
  bool gradients = true;
  /// Compares plain parameters whole, as a tensor-parallel plan leaves them. Otherwise, they are an error.
  bool allow_plain = false;
};

/// Throws ExpectationError for the first parameter whose name, type, device, local tensor or gradient differs. Values
/// must be finite in `reference`. Reduces Partial tensors, for which all ranks of their mesh must call it.
void check_sharded_parity(const torch::nn::Module& reference, const torch::nn::Module& sharded,
                          const ParityOptions& options = {});

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
