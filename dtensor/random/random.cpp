#include "dtensor/random/random.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/detail/AcceleratorHooksInterface.h>

#include <map>
#include <mutex>

#include "comm/context/rank_context.h"

namespace tessera {

namespace {

/// Creates generators at first use, with the last seed that was set.
class Generators {
 public:
  void seed(uint64_t seed) {
    std::lock_guard lock(mutex_);
    seed_ = seed;
    for (auto& [device, generator] : generators_) {
      std::lock_guard generator_lock(generator.mutex());
      generator.set_current_seed(seed);
    }
  }

  at::Generator of(at::DeviceType device_type) {
    std::lock_guard lock(mutex_);
    auto& generator = generators_[device_type];
    if (!generator.defined()) {
      generator = new_generator(device_type, seed_);
    }
    return generator;
  }

 private:
  std::mutex mutex_;
  uint64_t seed_ = at::default_rng_seed_val;
  std::map<at::DeviceType, at::Generator> generators_;
};

}  // namespace

void manual_seed(uint64_t seed) {
  rank_local<Generators>()->seed(seed);
}

at::Generator new_generator(at::Device device, uint64_t seed) {
  if (device.is_cpu() || device.is_meta()) {
    return at::make_generator<at::CPUGeneratorImpl>(seed);
  }
  auto generator = at::globalContext().getAcceleratorHooksInterface(device.type()).getNewGenerator(device.index());
  generator.set_current_seed(seed);
  return generator;
}

at::Generator dtensor_generator(at::DeviceType device_type) {
  return rank_local<Generators>()->of(device_type);
}

}  // namespace tessera
