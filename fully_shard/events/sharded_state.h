#pragma once
// The states of a unit's parameters, the steps between them, and events for tests and debuggers.
//
//   fsdp(model).set_event_observer([](const FSDPEvent& event) { fmt::print("{}\n", to_string(event)); });
//
//                gather             unshard               reshard
//   Sharded ───────────▶ Unsharding ─────────▶ Unsharded ────────────▶ Sharded
//                          │    ▲                  │
//                    drop  │    │ gather           │ reshard_post_forward
//                          ▼    │                  ▼       reshard
//                        (back) └────────── ShardedPostForward ────────▶ Sharded

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

namespace tessera {

enum class ShardedState : uint8_t {
  Sharded,             // this rank's rows of all parameters
  Unsharding,          // an all-gather is in flight
  Unsharded,           // all rows
  ShardedPostForward,  // beside its rows, a share of all parameters among a few ranks (reshard_after_forward = int)
};

/// Step of a unit. The first five are the transitions of ShardedState.
enum class FSDPEventKind : uint8_t {
  Gather,              // an all-gather is issued
  Unshard,             // it is waited for, and the parameters are full tensors
  Drop,                // an unused prefetched all-gather is waited for and thrown away
  Reshard,             // the full parameters are freed
  ReshardPostForward,  // the same, but a share stays
  Forward,             // forward computes from here on
  Backward,            // backward computes from here on
  ReduceScatter,       // the gradients' reduce-scatter is issued
  AllReduce,           // their all-reduce over the replicas is issued
  Reduced,             // they are waited for, and the sharded gradients are there: on a GPU, where backward ends
  KeepGradients,       // without communication: the unsharded gradients are kept for a later backward
};

std::string_view to_string(ShardedState state);
std::string_view to_string(FSDPEventKind step);

/// Returns the state after `step`, one of the transitions. Throws AssertionError for one that the diagram lacks.
/// `has_post_forward_shard`: a dropped gather falls back to it.
ShardedState next_state(ShardedState state, FSDPEventKind step, bool has_post_forward_shard = false);

struct FSDPEvent {
  FSDPEventKind step;
  std::string unit;  // the module's path below the outermost unit, "root" for that one
  bool operator==(const FSDPEvent&) const = default;
};

/// "gather block0"
std::string to_string(const FSDPEvent& event);

using UnitObserver = std::function<void(const FSDPEvent&)>;

}  // namespace tessera
