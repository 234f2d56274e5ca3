#pragma once
// Gradients that do not depend on the number of ranks. A step is bit-equal on 1, 2, 3, 4 or 8 ranks.
//
//   fully_shard(model, {.mesh = mesh});                         // or replicate(), or HSDP
//   LayoutIndependentGradients gradients(model, {.parts = 8});  // of a global batch, on any number of ranks
//   const double loss = gradients.backward([&](int64_t part) { return loss_of(model, batch_of(step, part)); });
//   gradients.clip_grad_norm(1.0);
//
// Each part of the batch runs its own forward and backward. A binary tree over the parts sums their gradients.
// docs/reliability.md covers requirements on the loss, limits and costs. Thread safety: like the model's backward.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>

#include "nn/hooks/module_ref.h"

namespace tessera {

struct LayoutIndependentOptions {
  int64_t parts = 8;  // equally sized parts of a global batch: a power of two, at least the number of ranks
};

class LayoutIndependentGradients {  // refers to the model, which must outlive it
 public:
  /// Returns the mean loss of a part, numbered from 0. Ranks that would otherwise idle call it twice for one part.
  using PartLoss = std::function<at::Tensor(int64_t part)>;

  /// Permanently replaces the reductions of the model's units. Throws StateError if the module is not a unit,
  /// ValueError for invalid `parts` or if trained parameters belong to no unit, and NotImplementedError for the layouts
  /// listed in docs/reliability.md.
  explicit LayoutIndependentGradients(ModuleRef model, LayoutIndependentOptions options = {});
  ~LayoutIndependentGradients();

  /// Adds the gradients of the parts' mean loss to the parameters' gradients, and returns that loss. Collective.
  double backward(const PartLoss& loss_of_part);
  double evaluate(const PartLoss& loss_of_part);  // returns the parts' mean loss without gradients; collective
  at::Tensor clip_grad_norm(double max_norm);     // like clip_grad_norm_() with the 2-norm; collective

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
