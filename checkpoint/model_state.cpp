#include <fmt/ranges.h>
#include <algorithm>

#include "base/error.h"
#include "checkpoint/state_dict.h"
#include "checkpoint/transfer.h"
#include "dtensor/dtensor.h"
#include "fully_shard/fsdp_module.h"

namespace tessera::dcp {

namespace {

/// Returns parameters and buffers. Throws StateError inside the model's forward or backward.
StateDict own_tensors(torch::nn::Module& model, bool ignore_frozen_params) {
  reshard_all(model);
  StateDict own;
  for (const auto& item : model.named_parameters()) {
    if (item.value().defined() && (item.value().requires_grad() || !ignore_frozen_params)) {
      // A later forward may turn the parameter into a full tensor, so the handle must be the shard. Without memory yet,
      // it is the parameter itself, for which to_empty allocates memory.
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
  const auto received = receive(state, ranks, options);
  const StateDict& given = received ? *received : state;
  std::vector<Transfer> transfers;
  ranks.on_all_ranks([&] {
    if (options.strict) {
      check_names(own, given);
    }
    for (const auto& [key, value] : given) {
      if (const auto found = own.find(key); found != own.end()) {
        TESSERA_CHECK(ValueError, std::holds_alternative<at::Tensor>(value), "set_model_state_dict: '{}' is no tensor",
                      key);
        const auto& [tensor, target] = transfers.emplace_back(
            Transfer{.given = std::get<at::Tensor>(value), .target = std::get<at::Tensor>(found->second)});
        if (!received) {
          check_readable(key, tensor);
        }
        check_fits(key, tensor, target, options);
      }
    }
  });
  transfer(transfers, ranks, options);
}

}  // namespace tessera::dcp
