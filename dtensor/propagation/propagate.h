#pragma once
// Sharding propagation: op + operand specs + scalars → the specs the operands need and the outputs get.
//
// For each mesh axis the cheapest strategy of the op's rule is taken, cost being the bytes that its
// redistributions move. A written operand that moves is carried back after the op, and costs both ways; what the
// op returns in its place is the operand itself, so strategies must give that output the operand's placement.
//
// Example on {dp: 2}: mm of a Shard(0) [8, 4] with a Shard(0) [4, 2] weight: the strategy "rows of a" moves
// only the weight (all-gather of 8 elements), so the plan is a: Shard(0), b: Replicate() → Shard(0).
//
// Pure: the same on every rank, no data, no communication.

#include "dtensor/propagation/sharding_rule.h"

namespace tessera {

/// Throws NotImplementedError naming the op, the placements and the remedy if no strategy fits.
OpPlan propagate(const OpRule& rule, OpCall& call);

/// The cheapest of `strategies` and "everything replicated" along call.axis. Throws as propagate does.
AxisStrategy cheapest_of(Strategies strategies, const OpCall& call);

/// Local kernels on empty shards raise, crash or change dtypes, so they are not called where all they could compute
/// is empty. An op on an empty tensor is left to its kernel, which may refuse it, on every rank; but where that tensor
/// is cut, some ranks' kernels would refuse what only their shards lack, such as a channel of no items.
bool has_nothing_to_compute(const OpPlan& plan);

/// Whether a schema argument or result is written in place.
inline bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

}  // namespace tessera
