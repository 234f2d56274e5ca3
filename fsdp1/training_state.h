#pragma once
// Activity of a module that FullyShardedDataParallel wrapped.

#include <cstdint>
#include <string_view>

namespace tessera {

enum class TrainingState : uint8_t {
  IDLE,
  FORWARD_BACKWARD,    // its forward or backward is running
  SUMMON_FULL_PARAMS,  // inside summon_full_params
};

constexpr std::string_view to_string(TrainingState state) {
  constexpr std::string_view names[] = {"IDLE", "FORWARD_BACKWARD", "SUMMON_FULL_PARAMS"};
  return names[static_cast<size_t>(state)];
}

}  // namespace tessera
