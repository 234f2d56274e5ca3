#pragma once
// States and transitions of a unit's parameters, and events for tests and debugging.
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
  Sharded,             // only this rank's rows of each parameter
  Unsharding,          // an all-gather is in flight
  Unsharded,           // all rows
  ShardedPostForward,  // also a larger shard, in a group of a few ranks (reshard_after_forward = int)
};

/// Event of a unit. The first five are the transitions of ShardedState.
enum class FSDPEventKind : uint8_t {
  Gather,              // issued an all-gather
  Unshard,             // waited for it; the parameters are full tensors
  Drop,                // waited for an unused prefetched all-gather and discarded it
  Reshard,             // freed the full parameters
  ReshardPostForward,  // freed them except for a post-forward shard
  Forward,             // forward computation begins
  Backward,            // backward computation begins
  ReduceScatter,       // issued the gradients' reduce-scatter
  AllReduce,           // issued the gradients' all-reduce over replicas
  Reduced,             // waited for them; sharded gradients are available (on a GPU, at the end of backward)
  KeepGradients,       // kept the unsharded gradients for a later backward, without communication
};

std::string_view to_string(ShardedState state);
std::string_view to_string(FSDPEventKind step);

/// Returns the state after transition `step`. Throws AssertionError for one that the diagram lacks. With
/// `has_post_forward_shard`, a dropped gather returns to that state.
ShardedState next_state(ShardedState state, FSDPEventKind step, bool has_post_forward_shard = false);

struct FSDPEvent {
  FSDPEventKind step;
  std::string unit;  // path of the module below the outermost unit, which is "root"
  bool operator==(const FSDPEvent&) const = default;
};

/// Returns, for example, "gather block0".
std::string to_string(const FSDPEvent& event);

using UnitObserver = std::function<void(const FSDPEvent&)>;

}  // namespace tessera
