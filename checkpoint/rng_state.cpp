#include "checkpoint/rng_state.h"

#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <vector>

#include "base/error.h"
#include "checkpoint/io/checkpoint_index.h"
#include "checkpoint/ranks/rank_sync.h"
#include "dtensor/random/random.h"

namespace tessera::dcp {

namespace {

struct NamedGenerator {
  std::string key;         // for this rank
  std::string common_key;  // for generators that are usually equal on all ranks; otherwise ""
  at::Generator generator;
};

std::vector<NamedGenerator> own_generators() {
  std::vector<at::DeviceType> device_types = {at::kCPU};
  if (at::hasCUDA()) {
    device_types.push_back(at::kCUDA);
  }
  const int rank = RankSync::all().rank();
  std::vector<NamedGenerator> result;
  for (const auto type : device_types) {
    const auto name = c10::DeviceTypeName(type, /*lower_case=*/true);
    result.push_back({.key = fmt::format("rng.dtensor.{}.rank{}", name, rank),
                      .common_key = fmt::format("rng.dtensor.{}", name),
                      .generator = dtensor_generator(type)});
    result.push_back({.key = fmt::format("rng.plain.{}.rank{}", name, rank),
                      .common_key = "",
                      .generator = at::globalContext().defaultGenerator(type)});
  }
  return result;
}

using SavedTensors = std::map<std::string, StoredTensor>;

/// Returns the states that all ranks saved of a generator with a common key.
std::vector<const StoredTensor*> saved_by_ranks(const SavedTensors& saved, const std::string& common_key) {
  const auto prefix = common_key + ".rank";
  std::vector<const StoredTensor*> result;
  for (auto it = saved.lower_bound(prefix); it != saved.end() && it->first.starts_with(prefix); ++it) {
    result.push_back(&it->second);
  }
  return result;
}

/// Compares checksums, so that no rank reads the others' states.
bool are_equal(const std::vector<const StoredTensor*>& states) {
  const auto same_blocks = [](const StoredPart& a, const StoredPart& b) { return a.blocks == b.blocks; };
  return std::ranges::all_of(
      states, [&](const auto* state) { return std::ranges::equal(state->parts, states[0]->parts, same_blocks); });
}

/// Returns the key to load for the generator; "" if the checkpoint has none.
std::string key_to_load(const NamedGenerator& own, const SavedTensors& saved, const std::string& path, int ranks) {
  if (!own.common_key.empty()) {
    const auto states = saved_by_ranks(saved, own.common_key);
    if (saved.contains(own.common_key) && are_equal(states)) {
      return own.common_key;
    }
    TESSERA_CHECK(ValueError,
                  states.empty() || (states.size() == static_cast<size_t>(ranks) && saved.contains(own.key)),
                  "{}: {}: the generators that DTensors draw from differed between the {} ranks that saved, and each "
                  "goes on with its own; now there are {}. Resume on as many ranks with the same meshes, or seed anew "
                  "with manual_seed in place of rng_state_to_load",
                  path, own.common_key, states.size(), ranks);
  }
  return saved.contains(own.key) ? own.key : "";
}

}  // namespace

StateDict get_rng_state() {
  StateDict state;
  for (auto& [key, common_key, generator] : own_generators()) {
    std::lock_guard lock(generator.mutex());
    state[key] = generator.get_state();
    if (!common_key.empty()) {
      state[common_key] = state[key];
    }
  }
  return state;
}

StateDict rng_state_to_load(const std::string& path) {
  const RankSync ranks = RankSync::all();
  StateDict state;
  ranks.on_all_ranks([&] {
    CheckpointIndex index = open_checkpoint(path);
    const SavedTensors& saved = index.tensors[Section::User];
    for (const auto& own : own_generators()) {
      if (const auto key = key_to_load(own, saved, path, ranks.size()); !key.empty()) {
        state[key] = at::empty(saved.at(key).sizes, saved.at(key).dtype);
      }
    }
  });
  return state;
}

void set_rng_state(const StateDict& state) {
  for (auto& [own_key, common_key, generator] : own_generators()) {
    const auto& key = state.contains(own_key) ? own_key : common_key;
    const auto entry = state.find(key);
    if (entry == state.end()) {
      continue;
    }
    const auto* tensor = std::get_if<at::Tensor>(&entry->second);
    TESSERA_CHECK(ValueError, tensor && tensor->defined(), "set_rng_state: {}: not a tensor", key);
    try {
      std::lock_guard lock(generator.mutex());
      generator.set_state(*tensor);
    } catch (const c10::Error& error) {
      TESSERA_CHECK(ValueError, false, "set_rng_state: {}: {}", key, error.what_without_backtrace());
    }
  }
}

}  // namespace tessera::dcp
