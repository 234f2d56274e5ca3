#include "checkpoint/transfer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/cast.h"
#include "base/error.h"
#include "checkpoint/format/manifest.h"
#include "checkpoint/local_part.h"
#include "comm/collectives.h"
#include "dtensor/dtensor.h"
#include "dtensor/local/dtensor_impl.h"
#include "dtensor/local/gather_full.h"
#include "fully_shard/fsdp_module.h"

namespace tessera::dcp {

namespace {

using nlohmann::json;

const at::Tensor& tensor_of(const Incoming& incoming, const std::string& key) {
  return std::get<at::Tensor>(incoming.state.at(key));
}

/// Names, sizes and dtypes of the tensors, and all values.
std::string describe(const StateDict& state) {
  json tensors = json::object();
  for (const auto& [key, value] : state) {
    if (const auto* tensor = std::get_if<at::Tensor>(&value)) {
      TESSERA_CHECK(ValueError, tensor->defined() && !is_dtensor(*tensor),
                    "set_state_dict: '{}' is {}; with broadcast_from_rank0, rank 0 gives whole plain tensors", key,
                    tensor->defined() ? "a DTensor" : "undefined");
      tensors[key] = {{"sizes", tensor->sizes().vec()}, {"dtype", static_cast<int>(tensor->scalar_type())}};
    }
  }
  return json{{"tensors", tensors}, {"values", format_values(values_of({.user = state}))}}.dump();
}

at::Tensor local_of(const at::Tensor& tensor) {
  const auto* meta = dtensor_meta(tensor);
  return meta ? meta->local : tensor.detach();
}

/// What is copied from. Else a rank would fail among the copies, where the others wait for it.
void check_readable(const std::string& key, const at::Tensor& given) {
  TESSERA_CHECK(ValueError, given.layout() == at::kStrided && !given.is_meta(),
                "set_state_dict: the given '{}' lies on {} in layout {}; it needs memory, and the strided layout", key,
                given.device().str(), c10::str(given.layout()));
  check_memory("set_state_dict", key, given);
}

/// What is copied to: nothing would come of a copy to the meta device.
at::Tensor memory_to_write(const std::string& key, const at::Tensor& target) {
  auto local = local_of(target);
  TESSERA_CHECK(ValueError, !local.is_meta(),
                "set_state_dict: the model's '{}' is on the meta device; call to_empty() before, so that it has memory",
                key);
  TESSERA_CHECK(ValueError, local.layout() == at::kStrided,
                "set_state_dict: the model's '{}' is in layout {}; only strided tensors can be set", key,
                c10::str(local.layout()));
  return local;
}

/// Beside dispatch, but counted as it does: a graph that saved `target` must not use the new values.
void write_local(const at::Tensor& target, const at::Tensor& local) {
  local_of(target).copy_(local);
  if (dtensor_meta(target)) {
    count_write(target);
  }
}

/// This rank's part of `whole`, into `target`.
void copy_part(const at::Tensor& whole, const at::Tensor& target) {
  const auto* meta = dtensor_meta(target);
  write_local(target, meta ? local_shard_of(whole.to(meta->local.device()), *meta->spec) : whole);
}

/// A copy under every layout, or with `copies` false where the whole tensor is not there already.
at::Tensor whole_of(const at::Tensor& tensor, bool copies) {
  const auto own = tensor.detach();
  const auto whole = is_dtensor(own) ? full_tensor(own) : own;
  return copies && whole.is_alias_of(local_of(own)) ? whole.clone() : whole;
}

bool has_dtensors(torch::nn::Module& model) {
  return has_sharded_params(model) || std::ranges::any_of(model.buffers(), is_dtensor);
}

bool has_dtensors(const StateDict& state) {
  return std::ranges::any_of(state, [](const auto& entry) {
    const auto* tensor = std::get_if<at::Tensor>(&entry.second);
    return tensor && is_dtensor(*tensor);
  });
}

}  // namespace

RankSync setting_ranks(torch::nn::Module& model, const StateDict& given, const StateDictOptions& options) {
  return options.broadcast_from_rank0 || has_dtensors(model) || has_dtensors(given) ? RankSync::all() : RankSync();
}

StateDict exported(StateDict own, const RankSync& ranks, const StateDictOptions& options) {
  const at::NoGradGuard no_grad;
  const bool only_first = options.full_state_dict && options.cpu_offload;
  StateDict result;
  for (auto& [key, value] : own) {
    if (auto* tensor = std::get_if<at::Tensor>(&value)) {
      TESSERA_CHECK(
          ValueError,
          !only_first || !is_dtensor(*tensor) || std::ranges::count(device_mesh(*tensor).root().ranks(), 0) > 0,
          "get_state_dict: rank 0 alone would have '{}', whose {} it is not in; leave cpu_offload out", key,
          device_mesh(*tensor).to_string());
      if (options.full_state_dict) {
        *tensor = whole_of(*tensor, /*copies=*/!options.cpu_offload);
      }
      if (options.cpu_offload) {
        *tensor = only_first && ranks.rank() > 0 ? at::Tensor()
                                                 : tensor->detach().to(at::kCPU, tensor->scalar_type(), false, true);
      }
    }
    if (!only_first || ranks.rank() == 0) {
      result[key] = std::move(value);
    }
  }
  return result;
}

Incoming receive(const StateDict& state, const RankSync& ranks, const StateDictOptions& options) {
  Incoming incoming;
  if (!options.broadcast_from_rank0) {
    incoming.state = state;
    return incoming;
  }
  const auto described = json::parse(ranks.from_rank0([&] { return describe(state); }));
  for (const auto& [key, tensor] : described.at("tensors").items()) {
    incoming.state[key] = ranks.rank() == 0 ? state.at(key) : StateValue(at::Tensor());
    incoming.known[key] = {.sizes = tensor.at("sizes").get<std::vector<int64_t>>(),
                           .dtype = static_cast<at::ScalarType>(tensor.at("dtype").get<int>())};
  }
  const auto values = parse_values(described.at("values").get<std::string>(), "set_state_dict");
  if (const auto own = values.find(Section::User); own != values.end()) {
    for (const auto& [key, value] : own->second) {
      std::visit([&, &name = key](const auto& content) { incoming.state[name] = content; }, value);
    }
  }
  return incoming;
}

void check_fits(const Incoming& incoming, const std::string& key, const at::Tensor& target,
                const StateDictOptions& options) {
  const auto& given = std::get<at::Tensor>(incoming.state.at(key));
  const auto found = incoming.known.find(key);
  const bool is_known = found != incoming.known.end();
  TESSERA_CHECK(ValueError, given.defined() || is_known, "set_state_dict: '{}' is an undefined tensor", key);
  if (given.defined()) {
    check_readable(key, local_of(given));
  }
  check_writable("set_state_dict", key, target);
  check_memory("set_state_dict", key, memory_to_write(key, target));
  const at::IntArrayRef sizes = is_known ? at::IntArrayRef(found->second.sizes) : given.sizes();
  TESSERA_CHECK(ValueError, sizes == target.sizes(), "set_state_dict: '{}' has sizes [{}], the model's has [{}]", key,
                fmt::join(sizes, ", "), fmt::join(target.sizes(), ", "));
  const auto dtype = is_known ? found->second.dtype : given.scalar_type(), own = target.scalar_type();
  TESSERA_CHECK(ValueError, may_cast(dtype, own),
                "set_state_dict: '{}' is {}, the model's {}; only floating dtypes are cast", key, c10::toString(dtype),
                c10::toString(own));
  TESSERA_CHECK(
      ValueError, !is_dtensor(target) || options.broadcast_from_rank0 || options.full_state_dict || is_dtensor(given),
      "set_state_dict: '{}' is a plain tensor, the model's a DTensor; set full_state_dict if it is whole", key);
  TESSERA_CHECK(
      ValueError,
      !is_dtensor(target) || !given.defined() || !is_dtensor(given) || device_mesh(given) == device_mesh(target),
      "set_state_dict: '{}' lies on {}, the model's on {}; go through a checkpoint", key,
      device_mesh(given).to_string(), device_mesh(target).to_string());
}

void copy_in(const Incoming& incoming, const std::string& key, const at::Tensor& target, const RankSync& ranks,
             const StateDictOptions& options) {
  const at::NoGradGuard no_grad;
  const at::Tensor& given = tensor_of(incoming, key);
  if (options.broadcast_from_rank0 && ranks.size() > 1) {
    const auto local = local_of(target);
    const auto whole = at::empty(target.sizes(), local.options());
    if (ranks.rank() == 0) {
      whole.copy_(given);
    }
    broadcast(whole, 0, default_group());
    copy_part(whole, target);
  } else if (is_dtensor(given) && is_dtensor(target)) {
    write_local(target, local_of(redistribute(given.detach(), placements(target))));
  } else if (is_dtensor(given)) {
    copy_part(full_tensor(given.detach()), target);
  } else {
    copy_part(given, target);
  }
}

}  // namespace tessera::dcp
