#include "fully_shard/events/unit_state.h"

#include "base/error.h"

namespace tessera {

std::string_view to_string(UnitState state) {
  constexpr std::string_view names[] = {"Sharded", "Gathering", "Unsharded", "ShardedSmaller"};
  return names[static_cast<size_t>(state)];
}

std::string_view to_string(UnitStep step) {
  constexpr std::string_view names[] = {"gather",          "unshard", "drop",          "reshard",
                                        "reshard_smaller", "forward", "backward",      "reduce_scatter",
                                        "all_reduce",      "reduced", "keep_gradients"};
  return names[static_cast<size_t>(step)];
}

std::string to_string(const UnitEvent& event) {
  return fmt::format("{} {}", to_string(event.step), event.unit);
}

UnitState next_state(UnitState state, UnitStep step, bool has_smaller) {
  using enum UnitState;
  const bool is_sharded = state == Sharded || state == ShardedSmaller;
  switch (step) {
    case UnitStep::Gather:
      if (is_sharded) {
        return Gathering;
      }
      break;
    case UnitStep::Unshard:
      if (state == Gathering) {
        return Unsharded;
      }
      break;
    case UnitStep::Drop:
      if (state == Gathering) {
        return has_smaller ? ShardedSmaller : Sharded;
      }
      break;
    case UnitStep::Reshard:
      if (state == Unsharded || state == ShardedSmaller) {
        return Sharded;
      }
      break;
    case UnitStep::ReshardSmaller:
      if (state == Unsharded) {
        return ShardedSmaller;
      }
      break;
    default:
      break;
  }
  TESSERA_ASSERT(false, "a unit that is {} cannot {}", to_string(state), to_string(step));
  return state;
}

}  // namespace tessera
