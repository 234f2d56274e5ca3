#pragma once
// Layers that treat each position of a sequence by itself (LayerNorm, RMSNorm, Dropout) on shards of the sequence, so
// that activations between the tensor-parallel layers are not held by every rank.
//
//   {"norm", SequenceParallel()},                                   // x [batch, sequence, features], Shard(1)
//   {"up", ColwiseParallel({.input_layouts = Shard(1)})},           // all-gather; backward: reduce-scatter
//   {"down", RowwiseParallel({.output_layouts = Shard(1)})},        // reduce-scatter; backward: all-gather
//
// The same bytes as the two all-reduces of tensor parallelism without it (V. Korthikanti et al.: Reducing Activation
// Recomputation in Large Transformer Models, 2022), plus one all-reduce of each norm parameter's gradient.
//
// Any module with a hook point may have this style: parameters and buffers, also of modules below it, are replicated
// DTensors, so a layer that mixes positions is still right, and costs communication. Dropout draws the same numbers as
// one process does (dtensor/random/random.h).
// Thread safety: as linear_styles.h. After SequenceParallel in torch/distributed/tensor/parallel/style.py.

#include "parallel/parallel_style.h"

namespace tessera {

struct SequenceParallelOptions {
  int64_t sequence_dim = 1;
  /// Outputs are plain: each rank's part, or the whole where the module left no dim cut. A pending sum is added up
  /// first, by an all-reduce, so that a plain output is never a mere term.
  bool use_local_output = false;
  /// See style_tensors.h: a plain input is cut evenly.
  bool even_shards = false;
};

/// The first tensor among the inputs, plain (this rank's part of the sequence) or a DTensor, is made
/// Shard(sequence_dim). Errors: StateError for a module without hook point; ValueError for a parameter that is
/// distributed otherwise, or a call without a tensor.
class SequenceParallel : public ParallelStyle {
 public:
  explicit SequenceParallel(SequenceParallelOptions options = {}) : options_(options) {}

  std::string name() const override { return "SequenceParallel"; }
  void check(const StyleTarget& target) const override;
  void apply(const StyleTarget& target) const override;

 private:
  SequenceParallelOptions options_;
};

}  // namespace tessera
