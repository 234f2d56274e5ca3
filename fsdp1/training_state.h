#pragma once
// What a module that FullyShardedDataParallel wrapped is doing.

#include <cstdint>
#include <string_view>

namespace tessera {

enum class TrainingState : uint8_t {
  IDLE,
  FORWARD_BACKWARD,    // its forward or its backward computes
  SUMMON_FULL_PARAMS,  // inside of summon_full_params
};

constexpr std::string_view to_string(TrainingState state) {
  constexpr std::string_view names[] = {"IDLE", "FORWARD_BACKWARD", "SUMMON_FULL_PARAMS"};
  return names[static_cast<size_t>(state)];
}

}  // namespace tessera
