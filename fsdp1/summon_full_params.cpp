// FSDP::summon_full_params: each parameter's TensorImpl adopts the full tensor, as in forward, but with the shards'
// dtype and values. At the end its rows are written back.

#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>

#include <algorithm>

#include "base/error.h"
#include "dtensor/local/dtensor_impl.h"
#include "dtensor/local/gather_full.h"
#include "fsdp1/fsdp.h"
#include "fsdp1/wrapper_state.h"
#include "fully_shard/autograd/backward_hooks.h"
#include "fully_shard/engine/unit_tree.h"
#include "nn/hooks/hook_point.h"

namespace tessera {

namespace {

/// Copies edits of the full tensor to this rank's rows. Without a write, the rows are not written, so that a forward
/// that expects a backward still finds its parameters unchanged. If it `was_written`, every rank writes its rows,
/// changed or not, so that all ranks agree whether that forward is outdated.
void write_back(const at::Tensor& full, const DTensorMeta& meta, bool was_written) {
  if (full.is_alias_of(meta.local)) {
    return;
  }
  const auto own = local_shard_of(full.to(meta.local.device()), *meta.spec);
  if (was_written || !at::equal(own, meta.local)) {  // also detects writes through data(), which count no version
    meta.local.copy_(own);
  }
}

/// Returns the number of writes to a tensor; 0 for one that does not count them.
int64_t read_version(const at::Tensor& tensor) {
  return tensor.defined() && !tensor.is_inference() ? static_cast<int64_t>(tensor._version()) : 0;
}

/// Parameter in its full form.
class SummonedParam {
 public:
  /// Collective, whether or not this rank `shows` the full parameter.
  SummonedParam(const ShardedParam& param, const SummonFullParamsOptions& options, bool shows)
      : param_(param.param()),
        name_(param.origin().name),
        sharded_(param_.variable_data()),
        sharded_grad_(param_.grad()),
        shows_(shows) {
    const auto full = whole(sharded_, options);
    const auto full_grad = options.with_grads && sharded_grad_.defined() ? whole(sharded_grad_, options) : at::Tensor();
    if (!shows_) {
      return;
    }
    param_.set_data(full);
    param_.mutable_grad() = options.with_grads ? full_grad : at::Tensor();
    shown_version_ = read_version(param_);
    shown_grad_version_ = read_version(full_grad);
  }

  /// Returns why edits cannot be written back, or "" if they can.
  std::string fault() const {
    const auto fits = [](const at::Tensor& full, const at::Tensor& sharded) {
      return !full.defined() || !sharded.defined() ||
             (full.sizes() == sharded.sizes() && full.scalar_type() == sharded.scalar_type());
    };
    if (!shows_ || (fits(param_, sharded_) && fits(param_.grad(), sharded_grad_))) {
      return {};
    }
    return fmt::format("'{}' is {} now, and was {}", name_, to_string(TensorMeta::of(param_)),
                       dtensor_meta(sharded_)->spec->to_string());
  }

  void restore(bool writes_back) {
    if (!shows_) {
      return;
    }
    const auto full_grad = param_.grad();
    if (writes_back) {
      write_back(param_.detach(), *dtensor_meta(sharded_), read_version(param_) != shown_version_);
    }
    if (writes_back && full_grad.defined() && sharded_grad_.defined()) {
      write_back(full_grad.detach(), *dtensor_meta(sharded_grad_), read_version(full_grad) != shown_grad_version_);
    }
    param_.mutable_grad() = at::Tensor();
    param_.set_data(sharded_);
    param_.mutable_grad() = sharded_grad_;
  }

 private:
  static at::Tensor whole(const at::Tensor& sharded, const SummonFullParamsOptions& options) {
    const auto full = gather_full(*dtensor_meta(sharded));
    return options.offload_to_cpu ? full.cpu() : full;
  }

  at::Tensor param_;
  std::string name_;
  at::Tensor sharded_;
  at::Tensor sharded_grad_;
  int64_t shown_version_ = 0, shown_grad_version_ = 0;
  bool shows_;
};

/// Attached to the modules of a unit of fully_shard or replicate while its parameters are full.
struct Summoned {};

std::vector<HookPoint*> unit_hook_points(const FSDPState& state) {
  std::vector<HookPoint*> points;
  for (const auto& module : state.modules()) {
    if (const auto live = module.lock()) {
      points.push_back(find_hook_point(*live));
    }
  }
  return points;
}

/// Wraps a unit of fully_shard or replicate, which has no WrapperState, in one. The unit has parameters.
std::shared_ptr<WrapperState> as_fsdp_unit(const std::shared_ptr<FSDPState>& state) {
  const auto& axes = state->group()->context().axes;
  auto unit = std::make_shared<WrapperState>();
  unit->state = state;
  unit->mesh = axes.mesh;
  unit->strategy = axes.num_shards() == 1 ? ShardingStrategy::NO_SHARD : ShardingStrategy::FULL_SHARD;
  unit->is_summoned = std::ranges::any_of(unit_hook_points(*state),
                                          [](const HookPoint* point) { return point->find<Summoned>() != nullptr; });
  return unit;
}

/// Returns all units at and below `module`, whichever function made them.
std::vector<NamedUnit> all_units(torch::nn::Module& module) {
  auto units = fsdp_units(module);
  for (const auto& [path, state] : fsdp_states(module)) {
    const auto is_same = [&own = state](const NamedUnit& other) { return other.unit->state == own; };
    if (state->group() && std::ranges::none_of(units, is_same)) {
      const bool is_own = state == find_fsdp_state(module);
      units.push_back({is_own ? "" : path, &module, as_fsdp_unit(state)});
    }
  }
  return units;
}

void check_options(const std::vector<NamedUnit>& units, const SummonFullParamsOptions& options) {
  TESSERA_CHECK(NotImplementedError, !options.rank0_only || !options.writeback,
                "summon_full_params: rank0_only with writeback: the other ranks would not see rank 0's changes; pass "
                "writeback = false");
  TESSERA_CHECK(NotImplementedError, !options.with_grads || !options.offload_to_cpu,
                "summon_full_params: with_grads with offload_to_cpu is not supported; pass one of them");
  for (const auto& [path, module, unit] : units) {
    TESSERA_CHECK(StateError, unit->training_state() == TrainingState::IDLE && current_backward() == -1,
                  "summon_full_params: {} is in the state {}; neither in forward or backward, nor in another "
                  "summon_full_params",
                  unit->state->label(), to_string(unit->training_state()));
    TESSERA_CHECK(StateError, !unit->state->group() || !unit->state->group()->unit_params().is_on_meta(),
                  "summon_full_params: the parameters of {} have no memory yet; call to_empty and give them values",
                  unit->state->label());
    TESSERA_CHECK(NotImplementedError, !options.offload_to_cpu || unit->strategy != ShardingStrategy::NO_SHARD,
                  "summon_full_params: offload_to_cpu, but {} is not sharded (NO_SHARD), so that its parameters are in "
                  "use where they are",
                  unit->state->label());
  }
}

/// Full parameters of some units; restored without communication.
class SummonScope {
 public:
  SummonScope(std::vector<NamedUnit> units, const SummonFullParamsOptions& options)
      : units_(std::move(units)), options_(options) {}

  /// Shows the parameters. If it throws, restore() undoes it.
  void enter() {
    const at::NoGradGuard no_grad;
    const bool shows = !options_.rank0_only || is_first_rank(units_);
    std::vector<NamedState> states;
    for (const auto& [path, module, unit] : units_) {
      lend(*unit);
      states.push_back({path, unit->state});
    }
    const auto fault = reshard_each(states);
    throw_on_all_ranks(with_shards(states), "summon_full_params", fault);
    for (const auto& [path, state] : states) {
      if (const auto& group = state->group()) {
        for (const auto& param : group->params()) {
          params_.emplace_back(param, options_, shows);
        }
      }
    }
  }

  /// Returns why edits are lost, or "". If one cannot be written back, none is.
  std::string restore() {
    const at::NoGradGuard no_grad;
    std::string fault;
    for (const auto& param : params_) {
      fault = fault.empty() && options_.writeback ? param.fault() : fault;
    }
    for (auto& param : params_) {
      param.restore(options_.writeback && fault.empty());
    }
    for (const auto& [path, module, unit] : units_) {
      unit->is_summoned = false;
    }
    give_back();
    return fault;
  }

 private:
  void lend(WrapperState& unit) {
    unit.is_summoned = true;
    for (auto* point : unit_hook_points(*unit.state)) {
      if (!point->find<WrapperState>()) {  // otherwise its own hooks check this
        point->attach(std::make_shared<Summoned>());
        exposed_.push_back(point);
        guards_.emplace_back(point->register_forward_pre_hook(
            [](HookPoint& at, TensorRefs) { check_not_summoned(true, at); }, HookOrder::Prepend));
      }
    }
  }

  void give_back() {
    guards_.clear();
    for (auto* point : exposed_) {
      point->detach<Summoned>();
    }
  }

  std::vector<NamedUnit> units_;
  SummonFullParamsOptions options_;
  std::vector<SummonedParam> params_;
  std::vector<HookPoint*> exposed_;
  std::vector<ScopedHook> guards_;
};

}  // namespace

void FSDP::summon_full_params(torch::nn::Module& module, const SummonFullParamsOptions& options,
                              const std::function<void()>& body) {
  auto units = all_units(module);
  if (!options.recurse) {
    std::erase_if(units, [](const NamedUnit& unit) { return !unit.path.empty(); });
  }
  check_options(units, options);
  if (options.offload_to_cpu && !options.rank0_only && !units.empty()) {
    TORCH_WARN(
        "summon_full_params: offload_to_cpu on every rank holds a full copy of the model a rank of this host; "
        "pass rank0_only = true for one");
  }
  SummonScope scope(std::move(units), options);
  try {
    scope.enter();
    body();
  } catch (...) {
    scope.restore();
    throw;
  }
  const auto fault = scope.restore();
  TESSERA_CHECK(ValueError, fault.empty(),
                "summon_full_params: {}; nothing was written back. Change values alone, or pass writeback = false",
                fault);
}

}  // namespace tessera
