#include "checkpoint/transfer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <string_view>
#include <utility>

#include "base/cast.h"
#include "base/error.h"
#include "checkpoint/format/fields.h"
#include "checkpoint/local_part.h"
#include "checkpoint/whole_tensors.h"
#include "dtensor/dtensor.h"
#include "dtensor/local/dtensor_impl.h"
#include "dtensor/local/gather_full.h"
#include "fully_shard/fsdp_module.h"

namespace tessera::dcp {

namespace {

/// Serializes names and values, and for tensors dtype and sizes.
std::string describe(const StateDict& state) {
  std::string text;
  for (const auto& [key, value] : state) {
    append_field(text, key);
    append_field(text, static_cast<int64_t>(value.index()));
    if (const auto* tensor = std::get_if<at::Tensor>(&value)) {
      TESSERA_CHECK(ValueError, tensor->defined() && !is_dtensor(*tensor),
                    "set_state_dict: '{}' is {}; with broadcast_from_rank0, rank 0 gives whole plain tensors", key,
                    tensor->defined() ? "a DTensor" : "undefined");
      append_field(text, static_cast<int64_t>(tensor->scalar_type()));
      append_field(text, tensor->sizes().vec());
    } else if (const auto* number = std::get_if<int64_t>(&value)) {
      append_field(text, *number);
    } else if (const auto* real = std::get_if<double>(&value)) {
      append_field(text, std::bit_cast<int64_t>(*real));
    } else {
      append_field(text, std::get<std::string>(value));
    }
  }
  return text;
}

/// Parses the result of describe(), with tensors on the meta device.
StateDict described(std::string_view text) {
  StateDict state;
  for (FieldReader reader(text); !reader.at_end();) {
    const std::string key(reader.text());
    StateValue value;
    switch (reader.number()) {
      case 0: {
        const auto dtype = static_cast<at::ScalarType>(reader.number());
        value = at::empty(reader.numbers(), at::device(at::kMeta).dtype(dtype));
        break;
      }
      case 1:
        value = reader.number();
        break;
      case 2:
        value = std::bit_cast<double>(reader.number());
        break;
      default:
        value = std::string(reader.text());
    }
    state.emplace_hint(state.end(), key, std::move(value));
  }
  return state;
}

/// Returns the memory to write. Throws for the meta device, where a copy would have no effect.
at::Tensor memory_to_write(const std::string& key, const at::Tensor& target) {
  auto local = detached_local(target);
  TESSERA_CHECK(ValueError, !local.is_meta(),
                "set_state_dict: the model's '{}' is on the meta device; call to_empty() before, so that it has memory",
                key);
  TESSERA_CHECK(ValueError, local.layout() == at::kStrided,
                "set_state_dict: the model's '{}' is in layout {}; only strided tensors can be set", key,
                c10::str(local.layout()));
  return local;
}

/// Bypasses dispatch but counts a version, so that a graph that saved `target` detects the change.
void write_local(const at::Tensor& target, const at::Tensor& local) {
  detached_local(target).copy_(local);
  if (dtensor_meta(target)) {
    count_write(target);
  }
}

/// Copies this rank's part of `whole` into `target`.
void copy_part(const at::Tensor& whole, const at::Tensor& target) {
  const auto* meta = dtensor_meta(target);
  write_local(target, meta ? local_shard_of(whole.to(meta->local.device()), *meta->spec) : whole);
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
  const bool has_none = only_first && ranks.rank() > 0;
  std::vector<at::Tensor> tensors;
  std::vector<StateValue*> places;
  for (auto& [key, value] : own) {
    if (const auto* tensor = std::get_if<at::Tensor>(&value)) {
      TESSERA_CHECK(
          ValueError,
          !only_first || !is_dtensor(*tensor) || std::ranges::count(device_mesh(*tensor).root().ranks(), 0) > 0,
          "get_state_dict: rank 0 alone would have '{}', whose {} it is not in; leave cpu_offload out", key,
          device_mesh(*tensor).to_string());
      tensors.push_back(*tensor);
      places.push_back(&value);
    }
  }
  const auto take = [&](size_t i, const at::Tensor& tensor) {
    *places[i] = has_none              ? at::Tensor()
                 : options.cpu_offload ? tensor.detach().to(at::kCPU, tensor.scalar_type(), false, true)
                                       : tensor;
  };
  if (options.full_state_dict) {
    gather_wholes(tensors, /*copies=*/!options.cpu_offload, take);
  } else {
    for (size_t i = 0; i < tensors.size(); ++i) {
      take(i, tensors[i]);
    }
  }
  if (has_none) {
    own.clear();
  }
  return own;
}

std::optional<StateDict> receive(const StateDict& state, const RankSync& ranks, const StateDictOptions& options) {
  if (!options.broadcast_from_rank0) {
    return std::nullopt;
  }
  const auto text = ranks.from_rank0([&] { return describe(state); });
  std::optional<StateDict> received;
  ranks.on_all_ranks([&] {
    if (ranks.rank() > 0) {
      received = described(text);
    }
  });
  return received;
}

void check_readable(const std::string& key, const at::Tensor& given) {
  TESSERA_CHECK(ValueError, given.defined(), "set_state_dict: '{}' is an undefined tensor", key);
  const auto local = detached_local(given);
  TESSERA_CHECK(ValueError, local.layout() == at::kStrided && !local.is_meta(),
                "set_state_dict: the given '{}' lies on {} in layout {}; it needs memory, and the strided layout", key,
                local.device().str(), c10::str(local.layout()));
  check_memory("set_state_dict", key, local);
}

void check_fits(const std::string& key, const at::Tensor& given, const at::Tensor& target,
                const StateDictOptions& options) {
  check_writable("set_state_dict", key, target);
  check_memory("set_state_dict", key, memory_to_write(key, target));
  TESSERA_CHECK(ValueError, given.sizes() == target.sizes(),
                "set_state_dict: '{}' has sizes [{}], the model's has [{}]", key, fmt::join(given.sizes(), ", "),
                fmt::join(target.sizes(), ", "));
  const auto dtype = given.scalar_type(), own = target.scalar_type();
  TESSERA_CHECK(ValueError, may_cast(dtype, own),
                "set_state_dict: '{}' is {}, the model's {}; only floating dtypes are cast", key, c10::toString(dtype),
                c10::toString(own));
  TESSERA_CHECK(
      ValueError, !is_dtensor(target) || options.broadcast_from_rank0 || options.full_state_dict || is_dtensor(given),
      "set_state_dict: '{}' is a plain tensor, the model's a DTensor; set full_state_dict if it is whole", key);
  TESSERA_CHECK(ValueError, !is_dtensor(target) || !is_dtensor(given) || device_mesh(given) == device_mesh(target),
                "set_state_dict: '{}' lies on {}, the model's on {}; go through a checkpoint", key,
                device_mesh(given).to_string(), device_mesh(target).to_string());
}

void transfer(const std::vector<Transfer>& transfers, const RankSync& ranks, const StateDictOptions& options) {
  const at::NoGradGuard no_grad;
  if (options.broadcast_from_rank0 && ranks.size() > 1) {
    std::vector<at::Tensor> given, targets;
    for (const auto& transfer : transfers) {
      given.push_back(transfer.given);
      targets.push_back(transfer.target);
    }
    broadcast_wholes(given, targets, [&](size_t i, const at::Tensor& whole) { copy_part(whole, targets[i]); });
    return;
  }
  for (const auto& [given, target] : transfers) {
    if (is_dtensor(given) && is_dtensor(target)) {
      write_local(target, detached_local(redistribute(given.detach(), placements(target))));
    } else {
      copy_part(is_dtensor(given) ? full_tensor(given.detach()) : given, target);
    }
  }
}

}  // namespace tessera::dcp
