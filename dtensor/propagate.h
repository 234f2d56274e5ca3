#pragma once
// Sharding propagation: op + operand specs + scalars → the specs the operands need and the outputs get.
//
// For each mesh axis the cheapest strategy of the op's rule is taken, cost being the bytes that its
// redistributions move. Written operands never move: a strategy that would move one is not considered.
//
// Example on {dp: 2}: mm of a Shard(0) [8, 4] with a Shard(0) [4, 2] weight: the strategy "rows of a" moves
// only the weight (all-gather of 8 elements), so the plan is a: Shard(0), b: Replicate() → Shard(0).
//
// Pure: the same on every rank, no data, no communication.

#include "dtensor/sharding_rule.h"

namespace tessera {

/// Throws NotImplementedError naming the op, the placements and the remedy if no strategy fits.
OpPlan propagate(const OpRule& rule, OpCall& call);

/// Global metas of the outputs of a call on tensors with `call.operands`' metas: runs it on meta tensors.
std::vector<TensorMeta> infer_output_metas(const OpCall& call);

/// The dtype of output 0 of an op that has no meta kernel: runs it on tensors of one element.
at::ScalarType infer_output_dtype(const OpCall& call);

/// Whether a schema argument or result is written in place.
inline bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

}  // namespace tessera
