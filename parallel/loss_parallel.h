#pragma once
// Computes cross-entropy of logits sharded by class, as ColwiseParallel returns them, without gathering the logits.
//
//   LossParallel scope;  // treats plain targets and class weights, equal on all ranks, as replicated
//   at::Tensor loss = torch::nn::functional::cross_entropy(logits.flatten(0, 1), labels.flatten());
//
// The loss is a Partial DTensor: item(), full_tensor() and backward() are correct, but to_local() is only one term.
// Thread safety: a scope affects the calling thread; scopes nest. Source: torch/distributed/tensor/parallel/loss.py.

#include "dtensor/dispatch/dispatch_scopes.h"

namespace tessera {

class LossParallel {
 public:
  LossParallel();
  ~LossParallel();
  LossParallel(const LossParallel&) = delete;
  LossParallel& operator=(const LossParallel&) = delete;

 private:
  // Keeps the backward of a recomputed region on this thread.
  detail::BackwardInThisThread backward_;
};

}  // namespace tessera
