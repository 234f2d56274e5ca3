#include "activation_checkpoint/forward_context.h"

#include <ATen/autocast_mode.h>

#include <mutex>
#include <optional>
#include <utility>

namespace tessera {

namespace {

at::Tensor get_state(at::Generator generator) {
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

ForwardContext::ForwardContext(std::vector<at::Generator> generators)
    : generators_(std::move(generators)),
      replicates_(ImplicitReplication::active()),
      runs_replicated_(ReplicateAndRun::active()),
      explicit_level_(ExplicitRedistribution::level()) {
  for (const auto& generator : generators_) {
    states_.push_back(get_state(generator));
  }
  for (const auto device : {at::kCPU, at::kCUDA}) {
    autocast_.push_back({device, at::autocast::is_autocast_enabled(device), at::autocast::get_autocast_dtype(device)});
  }
}

void ForwardContext::run(const std::function<void()>& forward) const {
  const ForwardContext outer(generators_);
  const auto apply = [](const ForwardContext& context) {
    for (size_t i = 0; i < context.generators_.size(); ++i) {
      set_state(context.generators_[i], context.states_[i]);
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
  std::optional<ReplicateAndRun> replicated_run;
  if (runs_replicated_) {
    replicated_run.emplace();
  }
  const ExplicitRedistribution redistribution(explicit_level_);
  forward();
}

}  // namespace tessera
