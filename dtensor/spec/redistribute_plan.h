#pragma once
// From one list of placements to another: which collectives, in which order. Pure and printable.
//
// Example on {dp: 2, tp: 2}, (Shard(0), Shard(0)) → (Shard(0), Replicate()): the cut of tp lies inside that
// of dp, so one all-gather over tp does it. (Shard(0), Shard(0)) → (Replicate(), Shard(0)) must undo tp,
// then dp, and cut over tp again: all-gather(tp), all-gather(dp), chunk(tp). With the cuts the other way
// round, (Shard(0, 1), Shard(0)) → (Replicate(), Shard(0)) is one all-gather over dp.

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
    PadToPartial,   // Shard → Partial(Sum), no communication: zeros where the other ranks' shards are
  };
  Kind kind;
  size_t axis;
  Placement from;
  Placement to;
  bool operator==(const RedistributeStep&) const = default;
  bool communicates() const { return kind <= Kind::AllReduce; }
};

/// The steps that lead from `from` to `to` (both normalized, of equal length). Empty if they are equal.
/// A step's shards are always the innermost cut of their dim at that moment, whatever order it names.
std::vector<RedistributeStep> plan_redistribute(const Placements& from, const Placements& to);

/// `current` after `step`, with orders that make a new cut the innermost one of its dim.
Placements after_step(Placements current, const RedistributeStep& step);

/// "all_gather(axis 1: Shard(0) → Replicate())", joined by ", "; "nothing" for an empty plan.
std::string to_string(const std::vector<RedistributeStep>& plan);

}  // namespace tessera
