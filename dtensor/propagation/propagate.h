#pragma once
// Sharding propagation: op + operand specs + scalars → required specs of operands, and specs of outputs.
//
// For each mesh axis it chooses the cheapest strategy of the op's rule, by bytes that redistribution moves. A written
// operand that is moved is copied back after the op, and costs both ways. Since the op returns the operand itself,
// strategies must give that output the operand's placement.
//
// Example on {dp: 2}: for mm of a Shard(0) [8, 4] and a Shard(0) [4, 2] weight, the strategy "rows of a" moves only the
// weight (all-gather of 8 elements), so the plan is a: Shard(0), b: Replicate() → Shard(0).
//
// Pure: equal on all ranks, without data or communication.

#include "dtensor/propagation/sharding_rule.h"

namespace tessera {

/// Throws NotImplementedError, with the op, the placements and the remedy, if no strategy fits.
OpPlan propagate(const OpRule& rule, OpCall& call);

/// Returns the cheapest of `strategies` and "everything replicated" along call.axis. Throws like propagate.
AxisStrategy choose_cheapest(Strategies strategies, const OpCall& call);

/// Returns whether all that local kernels could compute is empty. They are not called then, since on empty shards they
/// throw, crash or change dtypes. An op on an empty tensor is left to its kernel, which may throw on every rank, unless
/// the tensor is sharded: then some kernels would reject what only their shards lack, such as a channel without items.
bool has_nothing_to_compute(const OpPlan& plan);

/// Returns whether a schema argument or result is written in place.
inline bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

}  // namespace tessera
