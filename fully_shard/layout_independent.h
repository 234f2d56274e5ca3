#pragma once
// Gradients that do not depend on the number of ranks: a step has the same bits on 1, 2, 3, 4 or 8 of them.
//
//   fully_shard(model, {.mesh = mesh});                          // or replicate(), or HSDP
//   LayoutIndependentGradients gradients(model, {.parts = 8});   // of each global batch, on any number of ranks
//   const double loss = gradients.backward([&](int64_t part) { return loss_of(model, batch_of(step, part)); });
//   gradients.clip_grad_norm(1.0);
//   optimizer.step();
//
// A global batch is divided into parts of equal size. Each part runs forward and backward by itself, on one rank, and
// gradients are added by a binary tree over the parts (fully_shard/reduce/tree_reduction.h). So are losses, in the
// order of the parts, and the norm's squares, in the order of the rows of parameters.
//
// A part's loss must depend on the part and the parameters alone: draw random numbers, for dropout too, from a seed
// that belongs to the step and the part, and use no layers that keep statistics of batches. docs/reliability.md has
// limits and costs. Thread safety: like the model's backward.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>

#include "nn/hooks/module_ref.h"

namespace tessera {

struct LayoutIndependentOptions {
  /// Of a global batch: a power of two that is not below the number of ranks.
  int64_t parts = 8;
};

/// Refers to the model, which outlives it.
class LayoutIndependentGradients {
 public:
  /// Returns the mean loss of a part, numbered from 0. It is called once for each part, or a second time on ranks that
  /// would only wait, without effect on the result. All ranks call the model in the same way.
  using PartLoss = std::function<at::Tensor(int64_t part)>;

  /// `model`: a unit on the CPU, with all trained parameters. Replaces the units' reductions and divisors for good.
  /// Throws StateError for other modules, ValueError for `parts` and for parameters in no unit, and NotImplementedError
  /// for other devices, tensor parallelism, parameters that are sharded on another dim than 0, and for numbers of
  /// replicas and dtypes that do not allow it.
  explicit LayoutIndependentGradients(ModuleRef model, LayoutIndependentOptions options = {});
  ~LayoutIndependentGradients();

  /// Computes the gradients of the mean of the parts' losses, adds them to those that the parameters have, and returns
  /// that mean. Collective.
  double backward(const PartLoss& loss_of_part);
  /// Returns the mean of the parts' losses, without gradients. Collective.
  double evaluate(const PartLoss& loss_of_part);
  /// Like clip_grad_norm_(model->parameters(), max_norm) for the 2-norm. Collective.
  at::Tensor clip_grad_norm(double max_norm);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
