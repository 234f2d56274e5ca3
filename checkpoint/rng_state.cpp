#include "checkpoint/rng_state.h"

#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <mutex>
#include <vector>

#include "base/error.h"
#include "checkpoint/catalog.h"
#include "checkpoint/ranks.h"
#include "dtensor/random.h"

namespace tessera::dcp {

namespace {

struct NamedGenerator {
  std::string key;
  at::Generator generator;
};

std::vector<NamedGenerator> own_generators() {
  std::vector<at::DeviceType> device_types = {at::kCPU};
  if (at::hasCUDA()) {
    device_types.push_back(at::kCUDA);
  }
  const int rank = Ranks::all().rank();
  std::vector<NamedGenerator> result;
  for (const auto type : device_types) {
    const auto name = c10::DeviceTypeName(type, /*lower_case=*/true);
    result.push_back({fmt::format("rng.dtensor.{}", name), dtensor_generator(type)});
    result.push_back({fmt::format("rng.plain.{}.rank{}", name, rank), at::globalContext().defaultGenerator(type)});
  }
  return result;
}

}  // namespace

StateDict get_rng_state() {
  StateDict state;
  for (auto& [key, generator] : own_generators()) {
    std::lock_guard lock(generator.mutex());
    state[key] = generator.get_state();
  }
  return state;
}

StateDict rng_state_to_load(const std::string& path) {
  Catalog catalog;
  Ranks::all().together([&] { catalog = open_catalog(path); });
  const auto& saved = catalog.tensors[Section::User];
  StateDict state;
  for (const auto& own : own_generators()) {
    if (const auto found = saved.find(own.key); found != saved.end()) {
      state[own.key] = at::empty(found->second.sizes, found->second.dtype);
    }
  }
  return state;
}

void set_rng_state(const StateDict& state) {
  for (auto& [key, generator] : own_generators()) {
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
