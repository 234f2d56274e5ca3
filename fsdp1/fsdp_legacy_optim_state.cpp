#include "fsdp1/fsdp_legacy_optim_state.h"

#include <c10/util/Exception.h>

#include <functional>

#include "base/error.h"
#include "fsdp1/fsdp.h"

namespace tessera {

namespace {

using torch::nn::Module;
using torch::optim::Optimizer;

void warn_of_successor(const char* name, const char* successor, StateDictType type) {
  TORCH_WARN(name, " is deprecated: set ", to_string(type), " with FSDP::set_state_dict_type, and call ", successor);
}

/// Returns the result of `body` under these settings.
OptimStateDict under(Module& model, const StateDictSettings& settings, const std::function<OptimStateDict()>& body) {
  OptimStateDict dict;
  FSDP::state_dict_type(model, settings, [&] { dict = body(); });
  return dict;
}

StateDictSettings full_settings(bool rank0_only) {
  return StateDictSettings::make(StateDictType::FULL_STATE_DICT, std::nullopt,
                                 FullOptimStateDictConfig{.rank0_only = rank0_only});
}

/// Throws without units, because settings belong to units.
void check_has_units(const char* where, Module& model) {
  TESSERA_CHECK(StateError, !FSDP::fsdp_modules(model).empty(),
                "{}: the model has no module that FullyShardedDataParallel wrapped; call optim_state_dict or "
                "optim_state_dict_to_load for a plain one",
                where);
}

}  // namespace

OptimStateDict full_optim_state_dict(Module& model, Optimizer& optim, FullOptimStateDictOptions options) {
  check_has_units("full_optim_state_dict", model);
  warn_of_successor("full_optim_state_dict", "optim_state_dict", StateDictType::FULL_STATE_DICT);
  return under(model, full_settings(options.rank0_only),
               [&] { return optim_state_dict(model, optim, {.group = options.group}); });
}

OptimStateDict sharded_optim_state_dict(Module& model, Optimizer& optim) {
  check_has_units("sharded_optim_state_dict", model);
  warn_of_successor("sharded_optim_state_dict", "optim_state_dict", StateDictType::SHARDED_STATE_DICT);
  return under(model, StateDictSettings::make(StateDictType::SHARDED_STATE_DICT),
               [&] { return optim_state_dict(model, optim); });
}

OptimStateDict shard_full_optim_state_dict(const OptimStateDict& full, Module& model, Optimizer& optim) {
  check_has_units("shard_full_optim_state_dict", model);
  warn_of_successor("shard_full_optim_state_dict", "optim_state_dict_to_load", StateDictType::FULL_STATE_DICT);
  return under(model, full_settings(/*rank0_only=*/false),
               [&] { return optim_state_dict_to_load(model, optim, full); });
}

OptimStateDict flatten_sharded_optim_state_dict(const OptimStateDict& sharded, Module& model, Optimizer& optim) {
  check_has_units("flatten_sharded_optim_state_dict", model);
  warn_of_successor("flatten_sharded_optim_state_dict", "optim_state_dict_to_load", StateDictType::SHARDED_STATE_DICT);
  return under(model, StateDictSettings::make(StateDictType::SHARDED_STATE_DICT),
               [&] { return optim_state_dict_to_load(model, optim, sharded); });
}

OptimStateDict scatter_full_optim_state_dict(const OptimStateDict& full, Module& model, Optimizer& optim,
                                             const ProcessGroupPtr* group) {
  check_has_units("scatter_full_optim_state_dict", model);
  warn_of_successor("scatter_full_optim_state_dict", "optim_state_dict_to_load", StateDictType::FULL_STATE_DICT);
  return under(model, full_settings(/*rank0_only=*/true),
               [&] { return optim_state_dict_to_load(model, optim, full, {.group = group}); });
}

}  // namespace tessera
