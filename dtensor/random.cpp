#include "dtensor/random.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/detail/AcceleratorHooksInterface.h>

#include <map>
#include <mutex>

#include "comm/rank_context.h"

namespace tessera {

namespace {

/// Generators are made when first used, with the seed that was set last.
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
      generator = make(device_type);
    }
    return generator;
  }

 private:
  at::Generator make(at::DeviceType device_type) const {
    if (device_type == at::kCPU) {
      return at::make_generator<at::CPUGeneratorImpl>(seed_);
    }
    auto generator = at::globalContext().getAcceleratorHooksInterface(device_type).getNewGenerator();
    generator.set_current_seed(seed_);
    return generator;
  }

  std::mutex mutex_;
  uint64_t seed_ = at::default_rng_seed_val;
  std::map<at::DeviceType, at::Generator> generators_;
};

}  // namespace

void manual_seed(uint64_t seed) {
  rank_local<Generators>()->seed(seed);
}

at::Generator dtensor_generator(at::DeviceType device_type) {
  return rank_local<Generators>()->of(device_type);
}

}  // namespace tessera
