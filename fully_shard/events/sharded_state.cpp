#include "fully_shard/events/sharded_state.h"

#include "base/error.h"

namespace tessera {

std::string_view to_string(ShardedState state) {
  constexpr std::string_view names[] = {"Sharded", "Unsharding", "Unsharded", "ShardedPostForward"};
  return names[static_cast<size_t>(state)];
}

std::string_view to_string(FSDPEventKind step) {
  constexpr std::string_view names[] = {
      "gather",   "unshard",        "drop",       "reshard", "reshard_post_forward", "forward",
      "backward", "reduce_scatter", "all_reduce", "reduced", "keep_gradients"};
  return names[static_cast<size_t>(step)];
}

std::string to_string(const FSDPEvent& event) {
  return fmt::format("{} {}", to_string(event.step), event.unit);
}

ShardedState next_state(ShardedState state, FSDPEventKind step, bool has_post_forward_shard) {
  using enum ShardedState;
  struct Transition {
    ShardedState from;
    FSDPEventKind step;
    ShardedState to;
  };
  const Transition transitions[] = {
      {Sharded, FSDPEventKind::Gather, Unsharding},
      {ShardedPostForward, FSDPEventKind::Gather, Unsharding},
      {Unsharding, FSDPEventKind::Unshard, Unsharded},
      {Unsharding, FSDPEventKind::Drop, has_post_forward_shard ? ShardedPostForward : Sharded},
      {Unsharded, FSDPEventKind::Reshard, Sharded},
      {ShardedPostForward, FSDPEventKind::Reshard, Sharded},
      {Unsharded, FSDPEventKind::ReshardPostForward, ShardedPostForward},
  };
  for (const auto& transition : transitions) {
    if (transition.from == state && transition.step == step) {
      return transition.to;
    }
  }
  TESSERA_ASSERT(false, "a unit that is {} cannot {}", to_string(state), to_string(step));
  return state;
}

}  // namespace tessera
