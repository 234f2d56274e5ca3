#include "fully_shard/rank_agreement.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>

#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "comm/collectives.h"

namespace tessera {

namespace {

/// `own` of all ranks of the mesh, row-major, one row a rank.
at::Tensor gather_over_mesh(at::Tensor own, const DeviceMesh& mesh) {
  const at::AutoDispatchBelowADInplaceOrView below;
  own = own.to(at::Device(mesh.device_type())).view({1, -1});
  for (int64_t axis = mesh.ndim() - 1; axis >= 0; --axis) {
    const auto all = at::empty({own.size(0) * mesh.size(axis), own.size(1)}, own.options());
    all_gather(all, own, mesh.group(axis));
    own = all;
  }
  return own.to(at::kCPU);
}

at::Tensor bytes_of(const std::string& text, int64_t length) {
  const auto bytes = at::empty({length}, at::kByte);
  std::memset(bytes.mutable_data_ptr(), 0, static_cast<size_t>(length));
  std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
  return bytes;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  size_t begin = 0;
  for (size_t end = text.find('\n'); end != std::string::npos; end = text.find('\n', begin)) {
    lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  lines.push_back(text.substr(begin));
  return lines;
}

std::string line_at(const std::vector<std::string>& lines, size_t i) {
  return i < lines.size() ? lines[i] : "nothing more";
}

}  // namespace

std::vector<std::string> gather_texts(const DeviceMesh& mesh, const std::string& text) {
  const auto own = at::empty({2}, at::kLong);
  auto* own_data = own.mutable_data_ptr<int64_t>();
  own_data[0] = static_cast<int64_t>(std::hash<std::string>()(text));
  own_data[1] = static_cast<int64_t>(text.size());
  const auto all = gather_over_mesh(own, mesh);
  const auto* data = all.const_data_ptr<int64_t>();
  const int64_t ranks = all.size(0);
  bool equal = true;
  int64_t longest = 1;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    equal = equal && data[2 * rank] == data[0] && data[2 * rank + 1] == data[1];
    longest = std::max(longest, data[2 * rank + 1]);
  }
  if (equal) {
    return std::vector<std::string>(static_cast<size_t>(ranks), text);
  }
  const auto texts = gather_over_mesh(bytes_of(text, longest), mesh);
  std::vector<std::string> result;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const auto* begin = static_cast<const char*>(texts.const_data_ptr()) + rank * longest;
    result.emplace_back(begin, static_cast<size_t>(data[2 * rank + 1]));
  }
  return result;
}

void check_agreement(const DeviceMesh& mesh, const std::string& where, const Statement& own) {
  // One text a rank: the fault, then the items, a line each.
  const auto texts = gather_texts(mesh, fmt::format("{}\n{}", own.fault, fmt::join(own.items, "\n")));
  std::vector<std::vector<std::string>> lines;
  for (size_t i = 0; i < texts.size(); ++i) {
    lines.push_back(lines_of(texts[i]));
    TESSERA_CHECK(ValueError, lines[i][0].empty(), "{}: rank {} cannot: {}", where, mesh.ranks()[i], lines[i][0]);
  }
  for (size_t i = 1; i < lines.size(); ++i) {
    if (lines[i] == lines[0]) {
      continue;
    }
    size_t first = 0;
    while (line_at(lines[i], first) == line_at(lines[0], first)) {
      ++first;
    }
    TESSERA_CHECK(ValueError, false,
                  "{}: the ranks differ: rank {} has {}, rank {} has {}. All ranks make the same calls in the same "
                  "order, with modules of the same parameters",
                  where, mesh.ranks()[0], line_at(lines[0], first), mesh.ranks()[i], line_at(lines[i], first));
  }
}

}  // namespace tessera
