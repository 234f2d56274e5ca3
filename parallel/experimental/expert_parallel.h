#pragma once
// Experts of a mixture-of-experts layer spread over ranks: each rank holds some of them, and tokens travel to the ranks
// of their experts and back.
//
//   struct ExpertsImpl : torch::nn::Module {                            // parameters [experts, ...] each
//     at::Tensor forward(at::Tensor tokens, at::Tensor counts) {        // tokens sorted by expert
//       const auto w = is_dtensor(weight) ? to_local(weight) : weight;  // this rank's experts, as many as counts has
//       ...
//     }
//   };
//   TESSERA_MODULE(Experts);
//   parallelize_module(moe, mesh["ep"], {{"experts", ExpertParallel()}});
//
// The module is called, under this style as without it, with all of a rank's tokens [n, ...] sorted by expert and how
// many of them each expert has, `counts` [experts] of int32 or int64, both plain; it returns one row a token. Inside,
// forward gets the tokens of all ranks for the experts that are here, sorted by expert, and their counts in the
// caller's dtype: the same code runs. Neither tokens nor experts need to divide by the ranks; a rank may have none of
// either. What a forward without tokens returns, no rows, may have any dtype and width, as zeros_like(tokens) has: it
// becomes what the others return.
//
// Parameters are cut along dim 0. Their gradients are sums over the tokens of all ranks, those of one process that has
// all tokens; where the loss of each rank is a mean over its own tokens, and other gradients are averaged over the
// ranks, divide them by the number of ranks.
//
// Communication of a call: two small all-gathers that the host waits for, of the counts and of what kind of rows the
// forwards returned, and two all-to-alls of tokens. Backward: two all-to-alls.
// After ExpertParallel in torchtitan (torchtitan/distributed/expert_parallel.py) and D. Lepikhin et al.: GShard, 2020.

#include "parallel/parallel_style.h"

namespace tessera {

/// Errors: StateError for a module without hook point; ValueError for one without parameters or whose parameters differ
/// in dim 0, and, on every rank, for counts that do not fit and tokens whose dtype or width differs between ranks.
/// Another number of rows returned, and rows whose dtype or width differs between ranks, are errors on every rank.
/// Other inputs than two plain tensors, and whatever the module's forward throws, are errors on the rank where they
/// happen, and the others wait for it until the time-out.
class ExpertParallel : public ParallelStyle {
 public:
  std::string name() const override { return "ExpertParallel"; }
  void check(const StyleTarget& target) const override;
  void apply(const StyleTarget& target) const override;
};

}  // namespace tessera
