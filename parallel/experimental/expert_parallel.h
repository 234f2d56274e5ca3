#pragma once
// Distributes the experts of a mixture-of-experts layer over ranks. docs/semantics.md has the module's interface.
// Source: torchtitan/distributed/expert_parallel.py; D. Lepikhin et al., GShard, 2020.

#include "parallel/parallel_style.h"

namespace tessera {

/// Shards parameters [experts, ...] on dim 0 and sends tokens [n, ...] to their experts and back. Throws StateError
/// without a hook point and ValueError, on every rank, for parameters, counts, tokens or results that do not fit.
class ExpertParallel : public ParallelStyle {
 public:
  std::string name() const override { return "ExpertParallel"; }
  void check(const StyleTarget& target) const override;
  void apply(const StyleTarget& target) const override;
};

}  // namespace tessera
