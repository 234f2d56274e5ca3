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
// many of them each expert has, `counts` [experts], both plain; it returns one row a token. Inside, forward gets the
// tokens of all ranks for the experts that are here, sorted by expert, and their counts: the same code runs. Neither
// tokens nor experts need to divide by the ranks; a rank may have none of either.
//
// Parameters are cut along dim 0. Their gradients are sums over the tokens of all ranks, those of one process that has
// all tokens; where the loss of each rank is a mean over its own tokens, and other gradients are averaged over the
// ranks, divide them by the number of ranks.
//
// Communication of a call: an all-gather of the counts, which the host waits for, and two all-to-alls of tokens;
// backward two again. After ExpertParallel in torchtitan (torchtitan/distributed/expert_parallel.py) and D. Lepikhin et
// al.: GShard, 2020.

#include "parallel/parallel_style.h"

namespace tessera {

/// Errors: StateError for a module without hook point; ValueError for one without parameters or whose parameters differ
/// in dim 0, for other inputs than two plain tensors, counts that do not fit, and another number of rows returned. The
/// last, as whatever the module's forward throws, is raised on the rank where it happens, and the others wait for it
/// until the time-out: a forward that may get no tokens has to return none.
class ExpertParallel : public ParallelStyle {
 public:
  std::string name() const override { return "ExpertParallel"; }
  void check(const StyleTarget& target) const override;
  void apply(const StyleTarget& target) const override;
};

}  // namespace tessera
