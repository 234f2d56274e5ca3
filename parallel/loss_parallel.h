#pragma once
// Cross-entropy over logits whose classes are cut over ranks, as a column-wise output layer makes them, without ever
// gathering them.
//
//   {"output", ColwiseParallel()}                                     // logits [batch, length, vocabulary], Shard(-1)
//
//   const auto logits = model(tokens);                                // each rank has its part of the vocabulary
//   at::Tensor loss;
//   {
//     LossParallel scope;                                             // lets `labels` be a plain tensor
//     loss = torch::nn::functional::cross_entropy(logits.flatten(0, 1), labels.flatten());
//   }
//   loss.backward();
//   print(loss.item<float>());
//
// The rules of log_softmax and nll_loss do it, with or without this scope (dtensor/ops/reduction/softmax.cpp,
// nll_loss.cpp): the ranks exchange the maximum and the sum of exponentials of each row in forward and one number a row
// in backward, three all-reduces of as many numbers as there are targets, and each rank looks up the targets among its
// own classes. All reductions, label smoothing, ignore_index, class weights, probabilities as targets and any number of
// dims are right; the gradient arrives cut as the logits are, also where the classes do not divide by the ranks.
//
// The loss is a DTensor with a pending sum: item(), full_tensor() and backward() are right, but to_local() is this
// rank's term alone. (PyTorch's loss is replicated.)
//
// What the scope adds: plain targets and class weights, the same on every rank, count as replicated: in cross_entropy
// and nll_loss of a DTensor, and nowhere else, so that the model, and what is done with the loss, may be called inside
// of it or outside. So may backward, unless it computes the loss again (a checkpointed region that holds it). Targets
// that need a gradient get it as plain tensors. On meshes that cut the batch as well, make targets DTensors and leave
// the scope out.
//
// Thread safety: for the calling thread. Scopes nest.
// After loss_parallel in torch/distributed/tensor/parallel/loss.py, which needs the scope for all of this.

#include "dtensor/dispatch/dispatch_scopes.h"

namespace tessera {

class LossParallel {
 public:
  LossParallel();
  ~LossParallel();
  LossParallel(const LossParallel&) = delete;
  LossParallel& operator=(const LossParallel&) = delete;

 private:
  // For a region that backward computes again.
  detail::BackwardInThisThread backward_;
};

}  // namespace tessera
