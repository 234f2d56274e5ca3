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
// The rules of log_softmax and nll_loss do this with or without the scope: the ranks exchange three numbers per target.
// All reductions, label smoothing, ignore_index, class weights, probabilities as targets and uneven shards are
// supported. The loss is a DTensor, Partial: item(), full_tensor() and backward() are right, while to_local() is this
// rank's term. (PyTorch's loss is replicated.)
//
// The scope lets plain targets and class weights, equal on every rank, count as replicated in cross_entropy and
// nll_loss of a DTensor. On meshes that shard the batch as well, make targets DTensors and leave the scope out.
//
// Thread safety: for the calling thread. Scopes nest. Source: torch/distributed/tensor/parallel/loss.py.

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
