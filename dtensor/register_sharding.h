#pragma once
// A sharding rule for an op of one's own, so that it runs on DTensors: what register_sharding is in PyTorch
// (torch/distributed/tensor/experimental/_register_sharding.py).
//
//   TORCH_LIBRARY(robots, library) {
//     library.def("smooth(Tensor track, int window) -> Tensor");           // kernels: CPU or CUDA, and Meta
//   }
//   register_sharding("robots::smooth", [](const OpCall& call) -> Strategies {
//     Strategies strategies;                                               // each track by itself: all dims but
//     for (int64_t dim = 0; dim + 1 < call.operands[0].ndim(); ++dim) {    // the last may be cut
//       strategies.push_back({.operands = {Shard(dim)}, .outputs = {Shard(dim)}});
//     }
//     return strategies;
//   });
//
// A strategy says how the operands may lie along ONE axis of a mesh, and how the outputs then lie: the op, called on
// the local tensors, must give the local tensors of the outputs, be the shards uneven or empty. (A rank whose parts of
// all outputs are empty does not call it.) The cheapest strategy is taken for each axis, and operands that lie
// otherwise are moved. "Everything replicated" is always among them. Operands are the tensors among the arguments,
// lists opened; OpCall (sharding_rule.h) has their global sizes and the other arguments. An in-place op's output lies
// as what it writes.
//
// The op needs a kernel for the Meta device, which says the outputs' sizes and dtypes; without one it runs on whole
// tensors, on every rank. Gradients are as on plain tensors: an autograd kernel (TORCH_LIBRARY_IMPL(..., Autograd,
// ...)) runs on DTensors, and each op that it calls under its own rule.
//
// Thread safety: may be called at any time from any thread; calls that begin later run under it. Every rank must
// register the same before it runs the op; ranks that are threads may each do so, or one for all.

#include <functional>
#include <string>

#include "dtensor/propagation/sharding_rule.h"
#include "dtensor/spec/placement.h"

namespace tessera {

/// Registers `strategies`, a pure function (same call, same strategies, on every rank), for the op of this name, such
/// as "robots::smooth" or "robots::smooth.out". The op's earlier one is replaced. Throws ValueError where there is no
/// such op, where the library has a rule for it (all of aten that docs/op_coverage.md counts), where its kernel is a
/// CompositeImplicitAutograd one, or strategies is empty.
///
/// A call of the op throws ValueError, on every rank, where a strategy has not one placement for each operand and each
/// output, or cuts a dim that the tensor lacks. Negative dims count from the end.
void register_sharding(const std::string& op, std::function<Strategies(const OpCall& call)> strategies);

}  // namespace tessera
