#pragma once
// Runs LayerNorm, RMSNorm, Dropout and similar layers on shards of the sequence, which saves activation memory (V.
// Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022).
// Thread safety: hooks run in the thread that calls forward. Source: torch/distributed/tensor/parallel/style.py.

#include "parallel/parallel_style.h"

namespace tessera {

struct SequenceParallelOptions {
  int64_t sequence_dim = 1;
  bool use_local_output = false;  // partial outputs are reduced first
  bool even_shards = false;       // see style_tensors.h
};

/// Makes the first input tensor Shard(sequence_dim) and replicates all parameters and buffers. Throws StateError
/// without a hook point, and ValueError for parameters distributed differently and calls without a tensor.
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
