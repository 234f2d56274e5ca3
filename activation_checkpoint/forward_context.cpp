#include "activation_checkpoint/forward_context.h"

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>

#include <mutex>
#include <optional>
#include <utility>

#include "dtensor/random.h"

namespace tessera {

namespace {

at::Tensor state_of(at::Generator generator) {
  std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

void set_state(at::Generator generator, const at::Tensor& state) {
  std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

/// Calls a function at the end of its scope.
template <class Function>
class AtEnd {
 public:
  explicit AtEnd(Function function) : function_(std::move(function)) {}
  ~AtEnd() { function_(); }
  AtEnd(const AtEnd&) = delete;
  AtEnd& operator=(const AtEnd&) = delete;

 private:
  Function function_;
};

}  // namespace

ForwardContext::ForwardContext(std::vector<at::Device> devices)
    : devices_(std::move(devices)),
      replicates_(ImplicitReplication::active()),
      explicit_level_(ExplicitRedistribution::level()) {
  for (const auto& device : devices_) {
    for (const auto& generator : {at::globalContext().defaultGenerator(device), dtensor_generator(device.type())}) {
      generators_.push_back({generator, state_of(generator)});
    }
  }
  for (const auto device : {at::kCPU, at::kCUDA}) {
    autocast_.push_back({device, at::autocast::is_autocast_enabled(device), at::autocast::get_autocast_dtype(device)});
  }
}

void ForwardContext::run(const std::function<void()>& forward) const {
  const ForwardContext outer(devices_);
  const auto apply = [](const ForwardContext& context) {
    for (const auto& [generator, state] : context.generators_) {
      set_state(generator, state);
    }
    for (const auto& [device, enabled, dtype] : context.autocast_) {
      at::autocast::set_autocast_enabled(device, enabled);
      at::autocast::set_autocast_dtype(device, dtype);
    }
  };
  at::autocast::increment_nesting();
  const AtEnd restore([&] {
    apply(outer);
    if (at::autocast::decrement_nesting() == 0) {
      at::autocast::clear_cache();  // casts of parameters that an optimizer changes next
    }
  });
  apply(*this);
  std::optional<ImplicitReplication> replication;
  if (replicates_) {
    replication.emplace();
  }
  const ExplicitRedistribution redistribution(explicit_level_);
  forward();
}

}  // namespace tessera
