#pragma once
// Cross-entropy over logits whose classes are cut over ranks, as a column-wise output layer makes them, without ever
// gathering them.
//
//   {"output", ColwiseParallel({.use_local_output = false})}          // logits [batch, length, vocabulary], Shard(-1)
//
//   const auto logits = model(tokens);                                // each rank has its part of the vocabulary
//   {
//     LossParallel scope;                                             // lets `labels` be a plain tensor
//     auto loss = torch::nn::functional::cross_entropy(logits.flatten(0, 1), labels.flatten());
//     loss.backward();
//   }
//
// The rules of log_softmax and nll_loss do it, with or without this scope (dtensor/ops/softmax.cpp, nll_loss.cpp): the
// ranks exchange the maximum and the sum of exponentials of each row in forward and one number a row in backward, three
// all-reduces of as many numbers as there are targets, and each rank looks up the targets among its own classes. All
// reductions, label smoothing, ignore_index, class weights, probabilities as targets and any number of dims are right;
// the loss is a DTensor, its gradient arrives cut as the logits are, also where the classes do not divide by the ranks.
//
// What the scope adds: plain targets and class weights, the same on every rank, count as replicated. Autograd keeps
// them as they are, so backward must run in the scope too. On meshes that cut the batch as well, make them DTensors and
// leave the scope out.
//
// Thread safety: for the calling thread. Scopes nest.
// After loss_parallel in torch/distributed/tensor/parallel/loss.py, which needs the scope for all of this.

#include "dtensor/dispatch_scopes.h"

namespace tessera {

class LossParallel {
 public:
  LossParallel() = default;
  LossParallel(const LossParallel&) = delete;
  LossParallel& operator=(const LossParallel&) = delete;

 private:
  ImplicitReplication plain_targets_;
};

}  // namespace tessera
