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
// A strategy gives placements of the operands and the outputs along ONE axis of a mesh. With the operands placed so,
// the op called on the local tensors must give the local tensors of the outputs, even if shards are uneven or empty.
// The cheapest strategy is taken for each axis; "everything replicated" is always one. Operands are the tensors among
// the arguments, lists opened. An in-place op's output is placed as what it writes.
//
// The op needs a kernel for the Meta device, which gives the outputs' sizes and dtypes; without one it runs on whole
// tensors on every rank. An autograd kernel runs on DTensors, and each op that it calls under its own rule.
//
// Thread safety: may be called at any time from any thread. Every rank registers the same before it runs the op; ranks
// that are threads may each do so, or one for all.

#include <functional>
#include <string>

#include "dtensor/propagation/sharding_rule.h"
#include "dtensor/spec/placement.h"

namespace tessera {

/// Registers `strategies`, a pure function, for an op such as "robots::smooth.out", and replaces its earlier one.
/// Throws ValueError if there is no such op, the library has a rule for it, its kernel is a CompositeImplicitAutograd
/// one, or `strategies` is empty. A call of the op throws ValueError, on every rank, if a strategy lacks a placement or
/// shards a dim that the tensor lacks. Negative dims count from the end.
void register_sharding(const std::string& op, std::function<Strategies(const OpCall& call)> strategies);

}  // namespace tessera
