#include "comm/all_gather_strings.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "comm/collectives.h"

namespace tessera {

namespace {

/// Returns `own` of all ranks on the CPU, one row per rank.
at::Tensor gather_rows(const at::Tensor& own, const ProcessGroupPtr& group) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto input = own.to(has_backend(group, at::kCPU) ? at::kCPU : at::kCUDA);
  const auto all = at::empty({group->getSize(), own.numel()}, input.options());
  all_gather(all, input, group);
  return all.to(at::kCPU);
}

/// Returns size and hash.
at::Tensor make_summary(const std::string& text) {
  auto summary = at::empty({2}, at::kLong);
  auto* data = summary.mutable_data_ptr<int64_t>();
  data[0] = static_cast<int64_t>(text.size());
  data[1] = static_cast<int64_t>(std::hash<std::string>()(text));
  return summary;
}

at::Tensor padded_bytes(const std::string& text, int64_t length) {
  auto bytes = at::empty({length}, at::kByte);
  std::memset(bytes.mutable_data_ptr(), 0, static_cast<size_t>(length));
  std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
  return bytes;
}

}  // namespace

std::vector<std::string> all_gather_strings(const ProcessGroupPtr& group, const std::string& text) {
  const auto ranks = static_cast<size_t>(group->getSize());
  const auto summaries = gather_rows(make_summary(text), group);
  const auto* data = summaries.const_data_ptr<int64_t>();
  int64_t longest = 1;
  bool equal = true;
  for (size_t rank = 0; rank < ranks; ++rank) {
    longest = std::max(longest, data[2 * rank]);
    equal = equal && data[2 * rank] == data[0] && data[2 * rank + 1] == data[1];
  }
  if (equal) {
    return std::vector<std::string>(ranks, text);
  }
  const auto texts = gather_rows(padded_bytes(text, longest), group);
  const auto* begin = static_cast<const char*>(texts.const_data_ptr());
  std::vector<std::string> result;
  for (size_t rank = 0; rank < ranks; ++rank) {
    result.emplace_back(begin + static_cast<int64_t>(rank) * longest, static_cast<size_t>(data[2 * rank]));
  }
  return result;
}

}  // namespace tessera
