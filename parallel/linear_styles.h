#pragma once
// Tensor-parallel Linear and Embedding, sharded by columns (output features) or rows (input features). A pair of both
// costs one all-reduce in forward and one in backward (M. Shoeybi et al., Megatron-LM, 2019). Any number of features
// works. docs/semantics.md covers the layers in between and attention heads.
// Throws NotImplementedError for other modules and sparse embeddings, StateError without a hook point, and ValueError
// for parameters distributed differently and inputs that do not fit.
// Thread safety: hooks run in the thread that calls forward. Source: torch/distributed/tensor/parallel/style.py.

#include <optional>

#include "parallel/parallel_style.h"

namespace tessera {

struct ColwiseParallelOptions {
  Placement input_layouts = Replicate();  // of a plain input; a DTensor uses its own
  Placement output_layouts = Shard(-1);
  std::optional<bool> use_local_output = std::nullopt;  // default: only if output_layouts is Replicate()
  bool even_shards = false;                             // see style_tensors.h
};

/// Shards a Linear's weight and bias on dim 0, or an Embedding's weight on dim 1, and replicates the input. Of an
/// adapter (nn/lora_adapter.h), it shards B on dim 0; RowwiseParallel shards A on dim 1.
class ColwiseParallel : public ParallelStyle {
 public:
  explicit ColwiseParallel(ColwiseParallelOptions options = {}) : options_(options) {}

  std::string name() const override { return "ColwiseParallel"; }
  void check(const StyleTarget& target) const override;
  void apply(const StyleTarget& target) const override;

 private:
  ColwiseParallelOptions options_;
};

struct RowwiseParallelOptions {
  std::optional<Placement> input_layouts = std::nullopt;  // default: Shard(-1), for an Embedding Replicate()
  Placement output_layouts = Replicate();                 // by all-reduce; Shard(1): by reduce-scatter
  bool use_local_output = true;
  bool even_shards = false;
};

/// Shards a Linear's weight on dim 1 and its input on the last. An Embedding's weight is sharded on dim 0.
class RowwiseParallel : public ParallelStyle {
 public:
  explicit RowwiseParallel(RowwiseParallelOptions options = {}) : options_(options) {}

  std::string name() const override { return "RowwiseParallel"; }
  void check(const StyleTarget& target) const override;
  void apply(const StyleTarget& target) const override;

 private:
  RowwiseParallelOptions options_;
};

}  // namespace tessera
