#include "checkpoint/whole_tensors.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <map>
#include <optional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <tuple>
#include <utility>

#include "checkpoint/format/safetensors.h"
#include "checkpoint/local_part.h"
#include "comm/collectives.h"
#include "dtensor/dtensor.h"
#include "dtensor/local/dtensor_impl.h"

namespace tessera::dcp {

namespace {

// A tensor with more bytes is sent alone; smaller ones are combined until a message has this size.
constexpr int64_t kMessageBytes = 4 << 20;

/// Returns the whole tensor. It is a copy under every layout or, with `copies` false, only if needed.
at::Tensor gather_whole(const at::Tensor& tensor, bool copies) {
  const auto own = tensor.detach();
  const auto whole = is_dtensor(own) ? full_tensor(own) : own;
  return copies && whole.is_alias_of(detached_local(own)) ? whole.clone() : whole;
}

/// Returns which tensors go in one message: several of one kind, or a single one without a kind. Messages are in the
/// order of their first tensors, so that ranks which share some tensors send these in one order.
template <class FindKind>
std::vector<std::vector<size_t>> split_into_messages(const std::vector<at::Tensor>& tensors,
                                                     const FindKind& find_kind) {
  struct Open {
    size_t message = 0;
    int64_t bytes = 0;
  };
  std::vector<std::vector<size_t>> messages;
  std::map<typename decltype(find_kind(tensors[0]))::value_type, Open> open;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const int64_t bytes = tensors[i].numel() * item_bytes(tensors[i].scalar_type());
    const auto kind = find_kind(tensors[i]);
    if (!kind || bytes > kMessageBytes) {
      messages.push_back({i});
      continue;
    }
    const auto [place, is_first] = open.try_emplace(*kind);
    if (is_first || place->second.bytes + bytes > kMessageBytes) {
      place->second = {.message = messages.size(), .bytes = 0};
      messages.emplace_back();
    }
    messages[place->second.message].push_back(i);
    place->second.bytes += bytes;
  }
  return messages;
}

/// Returns the group of the only mesh axis that shards the tensor, which does so by rows. Null for any other tensor.
const ProcessGroupPtr* row_sharding_group(const at::Tensor& tensor) {
  const auto* meta = dtensor_meta(tensor);
  if (!meta || !meta->spec->meta().is_contiguous() || tensor.numel() == 0) {
    return nullptr;
  }
  const auto& spec = *meta->spec;
  const ProcessGroupPtr* group = nullptr;
  for (size_t axis = 0; axis < spec.placements().size(); ++axis) {
    if (spec.mesh().shape()[axis] == 1 || spec.placements()[axis].is_replicate()) {
      continue;
    }
    if (group || !spec.placements()[axis].is_shard(0)) {
      return nullptr;
    }
    group = &spec.mesh().group(static_cast<int64_t>(axis));
  }
  return group;
}

/// Returns whole copies of DTensors of one dtype, on one kind of device, whose rows are sharded over one group. Each
/// rank sends its rows of each tensor, padded to the number of the first rank's, so that all ranks' rows together are
/// the tensor and zeros behind it.
std::vector<at::Tensor> gather_rows(const std::vector<at::Tensor>& tensors) {
  const auto& group = *row_sharding_group(tensors[0]);
  const int64_t ranks = group->getSize();
  std::vector<int64_t> begins = {0};
  for (const auto& tensor : tensors) {
    check_not_stale(*dtensor_meta(tensor), "reading the whole tensor");
    const int64_t rows = tensor.size(0);
    begins.push_back(begins.back() + chunk_length(rows, ranks) * (tensor.numel() / rows));
  }
  const auto sent = at::zeros({begins.back()}, detached_local(tensors[0]).options());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto own = detached_local(tensors[i]);
    sent.narrow(0, begins[i], own.numel()).view(own.sizes()).copy_(own);
  }
  const auto message = at::empty({ranks, begins.back()}, sent.options());
  all_gather(message, sent, group);
  std::vector<at::Tensor> wholes;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto padded = message.narrow(1, begins[i], begins[i + 1] - begins[i]).reshape({-1});
    wholes.push_back(padded.narrow(0, 0, tensors[i].numel()).view(tensors[i].sizes()));
  }
  return wholes;
}

std::vector<at::Tensor> at_places(const std::vector<at::Tensor>& tensors, const std::vector<size_t>& places) {
  std::vector<at::Tensor> result;
  result.reserve(places.size());
  for (const size_t i : places) {
    result.push_back(tensors[i]);
  }
  return result;
}

}  // namespace

void gather_wholes(const std::vector<at::Tensor>& tensors, bool copies, const TakeWhole& take) {
  using Kind = std::tuple<const c10d::ProcessGroup*, at::ScalarType, c10::DeviceType>;
  const auto find_kind = [](const at::Tensor& tensor) {
    const auto* group = row_sharding_group(tensor);
    return group ? std::optional(Kind(group->get(), tensor.scalar_type(), tensor.device().type())) : std::nullopt;
  };
  for (const auto& message : split_into_messages(tensors, find_kind)) {
    if (message.size() == 1) {
      take(message[0], gather_whole(tensors[message[0]], copies));
      continue;
    }
    const auto wholes = gather_rows(at_places(tensors, message));
    for (size_t i = 0; i < message.size(); ++i) {
      take(message[i], wholes[i]);
    }
  }
}

void broadcast_wholes(const std::vector<at::Tensor>& given, const std::vector<at::Tensor>& targets,
                      const TakeWhole& take) {
  const auto find_kind = [](const at::Tensor& target) {
    return std::optional(std::pair(target.scalar_type(), target.device().type()));
  };
  for (const auto& message : split_into_messages(targets, find_kind)) {
    int64_t numel = 0;
    for (const size_t i : message) {
      numel += targets[i].numel();
    }
    const auto sent = at::empty({numel}, detached_local(targets[message[0]]).options());
    std::vector<at::Tensor> wholes;
    int64_t begin = 0;
    for (const size_t i : message) {
      wholes.push_back(sent.narrow(0, begin, targets[i].numel()).view(targets[i].sizes()));
      begin += targets[i].numel();
      if (get_rank() == 0) {
        wholes.back().copy_(given[i]);
      }
    }
    broadcast(sent, 0, default_group());
    for (size_t i = 0; i < message.size(); ++i) {
      take(message[i], wholes[i]);
    }
  }
}

}  // namespace tessera::dcp
