#include <fmt/ranges.h>
#include <algorithm>

#include "base/error.h"
#include "checkpoint/state_dict.h"
#include "checkpoint/transfer.h"
#include "dtensor/dtensor.h"
#include "fully_shard/fsdp_module.h"

namespace tessera::dcp {

namespace {

/// Throws StateError inside of the model's forward or backward.
StateDict own_tensors(torch::nn::Module& model, bool ignore_frozen_params) {
  reshard_all(model);
  StateDict own;
  for (const auto& item : model.named_parameters()) {
    if (item.value().defined() && (item.value().requires_grad() || !ignore_frozen_params)) {
      // A later forward may make the parameter itself a full tensor; the handle stays the shard. One without memory yet
      // is the parameter, which to_empty gives some.
      const bool is_shard = is_dtensor(item.value()) && !item.value().is_meta();
      own[item.key()] = is_shard ? item.value().detach() : item.value();
    }
  }
  for (const auto& item : model.named_buffers()) {
    if (item.value().defined()) {
      own[item.key()] = item.value();
    }
  }
  return own;
}

/// Throws KeyError unless both have the same names.
void check_names(const StateDict& own, const StateDict& given) {
  std::vector<std::string> missing, unexpected;
  for (const auto& [key, value] : own) {
    if (given.count(key) == 0) {
      missing.push_back(key);
    }
  }
  for (const auto& [key, value] : given) {
    if (own.count(key) == 0) {
      unexpected.push_back(key);
    }
  }
  TESSERA_CHECK(KeyError, missing.empty() && unexpected.empty(),
                "set_model_state_dict: missing: ({}); unexpected: ({}). With strict = false what both have is set",
                fmt::join(missing, ", "), fmt::join(unexpected, ", "));
}

}  // namespace

StateDict get_model_state_dict(ModuleRef model, const StateDictOptions& options) {
  if (options.full_state_dict) {
    reshard_on_all_ranks(model, "get_model_state_dict");
  }
  return exported(own_tensors(*model, options.ignore_frozen_params), RankSync::all(), options);
}

void set_model_state_dict(ModuleRef model, const StateDict& state, const StateDictOptions& options) {
  const RankSync ranks = setting_ranks(*model, state, options);
  StateDict own;
  ranks.on_all_ranks([&] { own = own_tensors(*model, options.ignore_frozen_params); });
  const Incoming incoming = receive(state, ranks, options);
  std::vector<std::string> keys;
  ranks.on_all_ranks([&] {
    if (options.strict) {
      check_names(own, incoming.state);
    }
    for (const auto& [key, value] : incoming.state) {
      if (own.count(key) == 1) {
        TESSERA_CHECK(ValueError, std::holds_alternative<at::Tensor>(value), "set_model_state_dict: '{}' is no tensor",
                      key);
        check_fits(incoming, key, std::get<at::Tensor>(own.at(key)), options);
        keys.push_back(key);
      }
    }
  });
  for (const auto& key : keys) {
    copy_in(incoming, key, std::get<at::Tensor>(own.at(key)), ranks, options);
  }
}

}  // namespace tessera::dcp
