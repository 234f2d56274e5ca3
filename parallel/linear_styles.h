#pragma once
// Linear and Embedding cut over the ranks of an axis: by columns (output features) or by rows (input features).
//
//   up (Colwise)        y = relu(x W1^T + b1)   W1 [out, in] Shard(0): each rank computes some of the hidden features
//   down (Rowwise)      z = y W2^T + b2         W2 [out, in] Shard(1): ... and adds up its part of the sum over them
//
//   parallelize_module(mlp, mesh["tp"], {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}});
//
// costs one all-reduce of z in forward and one of x's gradient in backward (M. Shoeybi et al.: Megatron-LM, 2019), and
// is right for every number of hidden features, also for fewer of them than there are ranks.
//
// input_layouts say what a plain input is; a DTensor's own placement counts. output_layouts say what the output
// becomes. With use_local_output the output is the plain local tensor, else a DTensor with its global size.
// docs/semantics.md has the layers in between, and attention heads.
//
// Throws:
// - NotImplementedError for modules other than torch::nn::Linear and Embedding, and for sparse gradients.
// - StateError for a module without hook point.
// - ValueError for a parameter that is distributed already, and for a call with an undefined tensor.
// Thread safety: values; the hooks run in the thread that calls forward.
// Source: torch/distributed/tensor/parallel/style.py.

#include <optional>

#include "parallel/parallel_style.h"

namespace tessera {

struct ColwiseParallelOptions {
  Placement input_layouts = Replicate();
  Placement output_layouts = Shard(-1);
  /// Default: plain where output_layouts make it whole on every rank, else a DTensor (PyTorch: always plain).
  std::optional<bool> use_local_output = std::nullopt;
  /// See style_tensors.h: a plain input that is sharded (input_layouts = Shard(1)) is cut evenly.
  bool even_shards = false;
};

/// Linear: weight and bias Shard(0). Embedding: the table [rows, features] Shard(1). The input is made Replicate.
class ColwiseParallel : public ParallelStyle {
 public:
  explicit ColwiseParallel(ColwiseParallelOptions options = {}) : options_(std::move(options)) {}

  std::string name() const override { return "ColwiseParallel"; }
  void check(const StyleTarget& target) const override;
  void apply(const StyleTarget& target) const override;

 private:
  ColwiseParallelOptions options_;
};

struct RowwiseParallelOptions {
  /// Default: Shard(-1) for Linear, where a plain input is this rank's input features, and Replicate for Embedding
  /// (PyTorch: Shard(-1) for both).
  std::optional<Placement> input_layouts = std::nullopt;
  /// Replicate() sums up the ranks' terms by an all-reduce, Shard(1) by a reduce-scatter along the sequence.
  Placement output_layouts = Replicate();
  /// The output is plain, and with Replicate() equal on all ranks of the mesh. So must be what is made of it: a plain
  /// dropout draws from libtorch's generator, which has the same seed on these ranks then. That of a DTensor (false)
  /// and SequenceParallel need no care.
  bool use_local_output = true;
  bool even_shards = false;
};

/// Linear: weight Shard(1), bias Replicate; the input is made Shard(-1). Embedding, the vocabulary-parallel one: the
/// table Shard(0); the input is made Replicate, each rank looks up the indices whose rows it holds, and the others'
/// rows count as zeros.
class RowwiseParallel : public ParallelStyle {
 public:
  explicit RowwiseParallel(RowwiseParallelOptions options = {}) : options_(std::move(options)) {}

  std::string name() const override { return "RowwiseParallel"; }
  void check(const StyleTarget& target) const override;
  void apply(const StyleTarget& target) const override;

 private:
  RowwiseParallelOptions options_;
};

}  // namespace tessera
