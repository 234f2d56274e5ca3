#include "fsdp1/fsdp.h"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/ScalarType.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <memory>
#include <unordered_set>
#include <vector>

#include "base/error.h"
#include "comm/collectives.h"
#include "dtensor/clip_grad_norm.h"
#include "dtensor/dtensor.h"
#include "dtensor/local/tensor_memory.h"
#include "fsdp1/wrapper_state.h"
#include "fully_shard/autograd/backward_hooks.h"
#include "fully_shard/convert_units.h"
#include "fully_shard/engine/unit_tree.h"

namespace tessera {

namespace {

using torch::nn::Module;

thread_local const EnableWrap* innermost_scope = nullptr;

void apply_to(Module& module, std::unordered_set<Module*>& seen, const std::function<void(Module&)>& fn) {
  if (!seen.insert(&module).second) {
    return;
  }
  for (const auto& child : module.children()) {
    apply_to(*child, seen, fn);
  }
  fn(module);
}

std::vector<at::Tensor> unique_parameters(const Module& module) {
  std::unordered_set<c10::TensorImpl*> seen;
  std::vector<at::Tensor> unique;
  for (const auto& parameter : module.parameters()) {
    if (seen.insert(parameter.unsafeGetTensorImpl()).second) {
      unique.push_back(parameter);
    }
  }
  return unique;
}

// A comm hook replaces the engine's collectives for gradients. The engine sends flags with the gradients
// (fully_shard/reduce/reduce_scatter_layout.h), which a hook does not see, so a small collective after it sends them.

ReduceScatterFn reduce_scatter_by(const CommHook& hook, int64_t flags) {
  return [run = hook.run, flags](const at::Tensor& output, const at::Tensor& input, ReduceOp,
                                 const ProcessGroupPtr& ranks) {
    const int64_t numel = output.numel(), gradients = numel - flags;
    const auto parts = input.view({-1, numel});
    run(parts.narrow(1, 0, gradients).contiguous().view(-1), output.narrow(0, 0, gradients));
    reduce_scatter(output.narrow(0, gradients, flags), parts.narrow(1, gradients, flags).contiguous().view(-1),
                   ReduceOp::Sum, ranks);
    return Pending();
  };
}

AllReduceFn all_reduce_by(const CommHook& hook, int64_t flags) {
  return [run = hook.run, flags](const at::Tensor& tensor, ReduceOp, const ProcessGroupPtr& ranks) {
    const int64_t gradients = tensor.numel() - flags;
    run(tensor.narrow(0, 0, gradients), at::Tensor());
    all_reduce(tensor.narrow(0, gradients, flags), ReduceOp::Sum, ranks);
    return Pending();
  };
}

}  // namespace

std::string_view to_string(ShardingStrategy strategy) {
  constexpr std::string_view names[] = {"FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD",
                                        "_HYBRID_SHARD_ZERO2"};
  return names[static_cast<size_t>(strategy)];
}

const FSDPOptions& FSDP::options() const {
  return unit_->options;
}
ShardingStrategy FSDP::sharding_strategy() const {
  return unit_->strategy;
}
const DeviceMesh& FSDP::device_mesh() const {
  return unit_->mesh;
}
bool FSDP::has_params() const {
  return unit_->state->group() != nullptr;
}
bool FSDP::check_is_root() const {
  return unit_->is_root(*module_);
}
TrainingState FSDP::training_state() const {
  return unit_->training_state();
}
void FSDP::assert_state(const std::vector<TrainingState>& allowed) const {
  unit_->assert_state("assert_state", allowed);
}
bool FSDP::mixed_precision_enabled_for_buffers() const {
  return unit_->options.mixed_precision.buffer_dtype.has_value();
}

void FSDP::apply(const std::function<void(Module&)>& fn) const {
  unit_->assert_state("apply", {TrainingState::IDLE});
  summon_full_params(*module_, {}, [&] {
    std::unordered_set<Module*> seen;
    apply_to(*module_, seen, fn);
  });
}

void FSDP::no_sync(const std::function<void()>& body) const {
  TESSERA_CHECK(StateError, check_is_root(), "no_sync: {} is a unit of a larger model; call it on the outermost one",
                unit_->state->label());
  unit_->assert_state("no_sync", {TrainingState::IDLE});
  struct Saved {
    std::shared_ptr<FSDPState> state;
    GradientSettings settings;
  };
  std::vector<Saved> saved;
  for (const auto& [path, state] : fsdp_states(*module_)) {  // including units of fully_shard and replicate
    auto& gradients = state->settings().gradients;
    saved.push_back({state, gradients});
    gradients.requires_gradient_sync = gradients.requires_all_reduce = false;
  }
  bool changed = false;
  const auto restore = [&] {
    for (const auto& [state, settings] : saved) {
      auto& gradients = state->settings().gradients;
      changed = changed || gradients.requires_gradient_sync;
      gradients.requires_gradient_sync = settings.requires_gradient_sync;
      gradients.requires_all_reduce = settings.requires_all_reduce;
    }
  };
  try {
    body();
  } catch (...) {
    restore();
    throw;
  }
  restore();
  TESSERA_CHECK(StateError, !changed,
                "no_sync: the reduction of gradients was switched on inside of the scope; leave set_requires_gradient_"
                "sync alone there");
}

at::Tensor FSDP::clip_grad_norm_(double max_norm, double norm_type) const {
  TESSERA_CHECK(StateError, check_is_root(),
                "clip_grad_norm_: {} is a unit of a larger model; call it on the outermost one", unit_->state->label());
  unit_->assert_state("clip_grad_norm_", {TrainingState::IDLE});
  const at::NoGradGuard no_grad;
  const auto parameters = unique_parameters(*module_);
  std::vector<at::Tensor> grads;
  for (const auto& parameter : parameters) {
    if (parameter.grad().defined()) {
      grads.push_back(parameter.grad());
    }
  }
  auto norm = get_total_norm(grads, {.norm_type = norm_type});
  if (grads.empty()) {
    TORCH_WARN("clip_grad_norm_ on a model without gradients: the norm is 0, in float32");
    return norm;
  }
  clip_grads_with_norm_(parameters, max_norm, norm);
  auto dtype = grads[0].scalar_type();
  for (const auto& grad : grads) {
    dtype = c10::promoteTypes(dtype, grad.scalar_type());
  }
  return norm.to(dtype);
}

UnshardHandle FSDP::unshard(bool async_op) const {
  return fsdp(*module_).unshard(async_op);
}

std::vector<FSDP> FSDP::fsdp_modules(Module& module, bool root_only) {
  std::vector<FSDP> result;
  std::vector<std::string> roots;
  for (const auto& [path, below, unit] : fsdp_units(module)) {
    const auto is_below = [&, &path = path](const std::string& root) {
      return root.empty() || path.compare(0, root.size() + 1, root + ".") == 0;
    };
    if (!root_only || std::none_of(roots.begin(), roots.end(), is_below)) {
      roots.push_back(path);
      result.emplace_back(*below, unit);
    }
  }
  return result;
}

FSDP detail::make_fsdp(Module& module, FSDPOptions options) {
  wrap_with_fsdp(module, std::move(options));
  return FSDP(module, find_fsdp_unit(module));
}

FSDP wrap_module(Module& module, FSDPOptions options) {
  return detail::make_fsdp(module, std::move(options));
}

EnableWrap::EnableWrap(FSDPOptions options) : options_(std::move(options)), outer_(innermost_scope) {
  innermost_scope = this;
}

EnableWrap::~EnableWrap() {
  innermost_scope = outer_;
}

const FSDPOptions* EnableWrap::current() {
  return innermost_scope ? &innermost_scope->options_ : nullptr;
}

namespace {

using torch::nn::Module;

/// Returns buffers, and parameters that belong to no unit. (A gathered unit has plain ones too.)
std::vector<at::Tensor> not_sharded(Module& module) {
  std::unordered_set<c10::TensorImpl*> managed;
  for (const auto& [path, state] : fsdp_states(module)) {
    for (size_t i = 0; state->group() && i < state->group()->params().size(); ++i) {
      managed.insert(state->group()->params()[i].param().unsafeGetTensorImpl());
    }
  }
  std::vector<at::Tensor> tensors;
  const auto add = [&](const std::vector<at::Tensor>& candidates) {
    for (const auto& tensor : candidates) {
      if (tensor.defined() && !is_dtensor(tensor) && managed.insert(tensor.unsafeGetTensorImpl()).second) {
        tensors.push_back(tensor);
      }
    }
  };
  add(module.buffers());
  add(module.parameters());
  return tensors;
}

void convert(const at::Tensor& tensor, const at::TensorOptions& to) {
  const auto converted = tensor.detach().to(to);
  if (converted.is_same(tensor) || storage_id(converted) == storage_id(tensor)) {
    return;
  }
  replace_data(tensor, converted);
  if (tensor.is_leaf() && tensor.grad().defined()) {
    tensor.mutable_grad() = tensor.grad().to(to);
  }
}

void assert_idle(const std::vector<NamedUnit>& units) {
  for (const auto& [path, module, unit] : units) {
    unit->assert_state("to", {TrainingState::IDLE});
  }
}

/// Returns `device`, with an index if it is a GPU: that of the units of `module`, or else of the current device.
at::Device checked_target(at::Device device, Module& module) {
  TESSERA_CHECK(ValueError, device.is_cpu() || device.is_cuda(), "to: {}; shards go to the CPU or to a GPU",
                device.str());
  if (device.is_cpu()) {
    return at::kCPU;
  }
  const int64_t gpus = at::hasCUDA() ? c10::impl::getDeviceGuardImpl(at::kCUDA)->deviceCount() : 0;
  TESSERA_CHECK(ValueError, gpus > (device.has_index() ? device.index() : 0),
                "to: {}, but this process sees {} GPUs; pass the index of one of them, or at::kCPU", device.str(),
                gpus);
  for (const auto& [path, state] : fsdp_states(module)) {
    if (state->group() && state->group()->context().device.is_cuda()) {
      return device.has_index() ? device : state->group()->context().device;
    }
  }
  const auto current = c10::impl::getDeviceGuardImpl(at::kCUDA)->getDevice();
  TESSERA_CHECK(ValueError, !device.has_index() || device == current,
                "to: {}, but the calling thread's GPU, where its groups communicate, is {}; pass at::kCUDA, or make {} "
                "the current device first",
                device.str(), current.str(), device.str());
  return current;
}

}  // namespace

void FSDP::to(at::Device device) const {
  const auto wrapped = fsdp_units(*module_);
  convert_units(*module_, "to", [&] {
    assert_idle(wrapped);
    device = checked_target(device, *module_);
    for (const auto& [path, module, unit] : wrapped) {
      unit->mesh.with_device_type(device.type());  // may throw; some units have no parameters
    }
    return UnitConversion{.device = device};
  });
  for (const auto& [path, module, unit] : wrapped) {
    unit->mesh = unit->mesh.with_device_type(device.type());
    unit->options.device_mesh = unit->mesh;
    if (unit->options.device_id) {
      unit->options.device_id = device;
    }
  }
  const at::NoGradGuard no_grad;
  for (const auto& tensor : not_sharded(*module_)) {
    convert(tensor, at::TensorOptions(device));
  }
}

void FSDP::to(at::ScalarType dtype) const {
  const auto wrapped = fsdp_units(*module_);
  convert_units(*module_, "to", [&] {
    assert_idle(wrapped);
    TESSERA_CHECK(ValueError, c10::isFloatingType(dtype),
                  "to: {} is no floating dtype; parameters and buffers of other dtypes stay as they are, so convert "
                  "buffers one by one, and parameters before they are wrapped",
                  toString(dtype));
    return UnitConversion{.dtype = dtype};
  });
  for (const auto& [path, module, unit] : wrapped) {
    unit->full_precision = dtype;
  }
  const at::NoGradGuard no_grad;
  for (const auto& tensor : not_sharded(*module_)) {
    if (tensor.is_floating_point()) {
      convert(tensor, at::TensorOptions(dtype));
    }
  }
}

void FSDP::cuda() const {
  to(at::kCUDA);
}

void FSDP::cpu() const {
  to(at::kCPU);
}

void FSDP::register_comm_hook(CommHook hook) const {
  TESSERA_CHECK(StateError, check_is_root(),
                "register_comm_hook: {} is a unit of a larger model; call it on the outermost one",
                unit_->state->label());
  unit_->assert_state("register_comm_hook", {TrainingState::IDLE});
  const auto units = fsdp_units(*module_);
  for (const auto& [path, module, unit] : units) {
    const auto name = path.empty() ? "the root" : fmt::format("'{}'", path);
    TESSERA_CHECK(NotImplementedError, !is_hybrid(unit->strategy),
                  "register_comm_hook: {} is {}, whose gradients go over two groups of ranks; a hook is for "
                  "FULL_SHARD, SHARD_GRAD_OP and NO_SHARD",
                  name, to_string(unit->strategy));
    TESSERA_CHECK(StateError, !unit->comm_hook, "register_comm_hook: {} has a hook already; register one, once", name);
  }
  for (const auto& [path, state] : fsdp_states(*module_)) {
    const auto is_own = [&own = state](const NamedUnit& named) { return named.unit->state == own; };
    TESSERA_CHECK(NotImplementedError, std::ranges::any_of(units, is_own),
                  "register_comm_hook: '{}' is a unit of fully_shard or replicate, whose gradients a hook would not "
                  "see; wrap it in FullyShardedDataParallel, or set collectives of your own on all units, "
                  "fsdp(module).set_custom_reduce_scatter() and set_custom_all_reduce()",
                  path);
  }
  TESSERA_CHECK(ValueError, hook.run != nullptr,
                "register_comm_hook: the hook's run is empty; give a function of (full_flat_grad, output)");
  for (const auto& [path, module, unit] : units) {
    unit->comm_hook = hook;
    if (!unit->state->group()) {
      continue;
    }
    const auto flags = gradient_flags_numel(static_cast<int64_t>(unit->state->group()->params().size()));
    // A division by 1 after a sum is omitted.
    auto& gradients = unit->state->settings().gradients;
    gradients.divide_factor = 1;
    gradients.reduce_scatter = reduce_scatter_by(hook, flags);
    gradients.all_reduce = all_reduce_by(hook, flags);
  }
}

bool FSDP::low_precision_hook_enabled() const {
  return unit_->comm_hook && unit_->comm_hook->is_low_precision;
}

}  // namespace tessera
