#pragma once
// Plans the collectives from one list of placements to another. Pure functions.
//
// Example on {dp: 2, tp: 2}: (Shard(0), Shard(0)) → (Shard(0), Replicate()) is one all-gather over tp, which sharded
// last. (Shard(0), Shard(0)) → (Replicate(), Shard(0)) must undo tp, then dp, and shard over tp again: all-gather(tp),
// all-gather(dp), chunk(tp). In the other order, (Shard(0, 1), Shard(0)) → (Replicate(), Shard(0)) is one all-gather
// over dp.

#include <string>
#include <vector>

#include "dtensor/spec/placement.h"

namespace tessera {

struct RedistributeStep {
  enum class Kind : uint8_t {
    AllGather,      // Shard → Replicate
    AllToAll,       // Shard → Shard of another dim
    ReduceScatter,  // Partial → Shard
    AllReduce,      // Partial → Replicate
    Chunk,          // Replicate → Shard, no communication
    MakePartial,    // Replicate → Partial, no communication
    PadToPartial,   // Shard → Partial(Sum), no communication: zeros for other ranks' shards
  };
  Kind kind;
  size_t axis;
  Placement from;
  Placement to;
  bool operator==(const RedistributeStep&) const = default;
  bool communicates() const { return kind <= Kind::AllReduce; }
};

/// Returns the steps from `from` to `to`, which are normalized and equally long; empty if they are equal. The shards of
/// a step are the innermost of their dim at that moment, for any order.
std::vector<RedistributeStep> plan_redistribute(const Placements& from, const Placements& to);

/// Returns `current` after `step`, where a new shard is the innermost of its dim.
Placements after_step(Placements current, const RedistributeStep& step);

/// Returns "all_gather(axis 1: Shard(0) → Replicate())", joined by ", ", or "nothing".
std::string to_string(const std::vector<RedistributeStep>& plan);

}  // namespace tessera
