#pragma once
// Gradients that do not depend on the number of ranks: a step has the same bits on 1, 2, 3, 4 or 8 of them.
//
//   fully_shard(model, {.mesh = mesh});                         // or replicate(), or HSDP
//   LayoutIndependentGradients gradients(model, {.parts = 8});  // of a global batch, on any number of ranks
//   const double loss = gradients.backward([&](int64_t part) { return loss_of(model, batch_of(step, part)); });
//   gradients.clip_grad_norm(1.0);
//
// Each part runs forward and backward by itself; a binary tree over the parts adds their gradients. docs/reliability.md
// has what a part's loss may depend on, limits and costs. Thread safety: like the model's backward.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>

#include "nn/hooks/module_ref.h"

namespace tessera {

struct LayoutIndependentOptions {
  int64_t parts = 8;  // of equal size; a power of two, not below the number of ranks
};

class LayoutIndependentGradients {  // refers to the model, which outlives it
 public:
  /// Returns the mean loss of a part, numbered from 0. Ranks that would only wait call it twice for a part.
  using PartLoss = std::function<at::Tensor(int64_t part)>;

  /// Replaces the reductions of the model's units for good. Throws StateError for a module that is no unit, ValueError
  /// for `parts` and trained parameters in no unit, and NotImplementedError for the layouts that docs/reliability.md
  /// names.
  explicit LayoutIndependentGradients(ModuleRef model, LayoutIndependentOptions options = {});
  ~LayoutIndependentGradients();

  /// Adds the gradients of the parts' mean loss to those of the parameters, and returns that loss. Collective.
  double backward(const PartLoss& loss_of_part);
  double evaluate(const PartLoss& loss_of_part);  // returns the parts' mean loss, without gradients; collective
  at::Tensor clip_grad_norm(double max_norm);     // like clip_grad_norm_() for the 2-norm; collective

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
