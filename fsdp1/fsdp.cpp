#include "fsdp1/fsdp.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/ScalarType.h>
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

// A comm hook stands in place of the engine's collectives for gradients. The engine sends flags beside the gradients
// (fully_shard/reduce/reduce_scatter_layout.h), which a hook does not see: a small collective after it sends them.

/// How many elements of a rank's part are gradients.
int64_t gradient_numel(const ParamGroup& group, int64_t part_numel) {
  return part_numel - gradient_flags_numel(static_cast<int64_t>(group.params().size()));
}

/// The group owns who calls it, so a pointer does.
ReduceScatterFn reduce_scatter_by(const CommHook& hook, const ParamGroup* group) {
  return [run = hook.run, group](const at::Tensor& output, const at::Tensor& input, ReduceOp,
                                 const ProcessGroupPtr& ranks) {
    const int64_t numel = output.numel(), gradients = gradient_numel(*group, numel), flags = numel - gradients;
    const auto parts = input.view({-1, numel});
    run(parts.narrow(1, 0, gradients).contiguous().view(-1), output.narrow(0, 0, gradients));
    reduce_scatter(output.narrow(0, gradients, flags), parts.narrow(1, gradients, flags).contiguous().view(-1),
                   ReduceOp::Sum, ranks);
    return Pending();
  };
}

AllReduceFn all_reduce_by(const CommHook& hook, const ParamGroup* group) {
  return [run = hook.run, group](const at::Tensor& tensor, ReduceOp, const ProcessGroupPtr& ranks) {
    const int64_t gradients = gradient_numel(*group, tensor.numel());
    run(tensor.narrow(0, 0, gradients), at::Tensor());
    all_reduce(tensor.narrow(0, gradients, tensor.numel() - gradients), ReduceOp::Sum, ranks);
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
  for (const auto& [path, state] : fsdp_states(*module_)) {  // those of fully_shard and replicate too
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

/// Units at and below `module`, those of fully_shard and replicate too, that have parameters.
std::vector<std::shared_ptr<FSDPState>> units_with_params(Module& module) {
  std::vector<std::shared_ptr<FSDPState>> units;
  for (const auto& [path, state] : fsdp_states(module)) {
    if (state->group()) {
      units.push_back(state);
    }
  }
  return units;
}

/// Buffers, and parameters of no unit; a unit that is gathered has plain ones too.
std::vector<at::Tensor> not_sharded(const Module& module, const std::vector<std::shared_ptr<FSDPState>>& units) {
  std::unordered_set<c10::TensorImpl*> managed;
  for (const auto& state : units) {
    for (const auto& param : state->group()->params()) {
      managed.insert(param.param().unsafeGetTensorImpl());
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

void replace_by(const at::Tensor& tensor, const at::Tensor& converted) {
  if (!converted.is_same(tensor)) {
    replace_data(tensor, converted);
  }
}

}  // namespace

void FSDP::to(at::Device device) const {
  unit_->assert_state("to", {TrainingState::IDLE});
  const auto units = units_with_params(*module_);
  for (const auto& state : units) {
    const auto belongs = state->group()->context().shard_options.device();
    TESSERA_CHECK(ValueError,
                  device.type() == belongs.type() && (!device.has_index() || device == belongs || device.is_cpu()),
                  "to: the shards of {} are on {}, and cannot go to {}: their mesh communicates there. Move the module "
                  "before it is wrapped, or wrap it with device_id = {} and a mesh on that device",
                  state->label(), belongs.str(), device.str(), device.str());
  }
  const at::NoGradGuard no_grad;
  for (const auto& tensor : not_sharded(*module_, units)) {
    replace_by(tensor, tensor.detach().to(device));
  }
}

void FSDP::to(at::ScalarType dtype) const {
  unit_->assert_state("to", {TrainingState::IDLE});
  TESSERA_CHECK(ValueError, c10::isFloatingType(dtype),
                "to: {} is no floating dtype; buffers of other dtypes stay as "
                "they are, so convert those one by one",
                toString(dtype));
  const auto units = units_with_params(*module_);
  for (const auto& state : units) {
    for (const auto& param : state->group()->params()) {
      const auto own = param.spec()->dtype();
      TESSERA_CHECK(NotImplementedError, own == dtype || !c10::isFloatingType(own),
                    "to: parameter '{}' of {} is sharded in {}, and cannot become {}. Convert the module before it is "
                    "wrapped, or let it compute in {} with mixed_precision.param_dtype, which keeps the shards",
                    param.origin().name, param.origin().module, toString(own), toString(dtype), toString(dtype));
    }
  }
  const at::NoGradGuard no_grad;
  for (const auto& tensor : not_sharded(*module_, units)) {
    if (tensor.is_floating_point()) {
      replace_by(tensor, tensor.detach().to(dtype));
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
    const auto* group = unit->state->group().get();
    if (!group) {
      continue;
    }
    // Divided by 1 after a sum: not at all.
    auto& gradients = unit->state->settings().gradients;
    gradients.divide_factor = 1;
    gradients.reduce_scatter = reduce_scatter_by(hook, group);
    gradients.all_reduce = all_reduce_by(hook, group);
  }
}

bool FSDP::low_precision_hook_enabled() const {
  return unit_->comm_hook && unit_->comm_hook->is_low_precision;
}

}  // namespace tessera
