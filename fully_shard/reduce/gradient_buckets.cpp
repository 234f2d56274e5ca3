#include "fully_shard/reduce/gradient_buckets.h"

#include <algorithm>

#include "base/error.h"

namespace tessera {

std::vector<size_t> cut_by_bytes(const std::vector<int64_t>& bytes, int64_t cap) {
  std::vector<size_t> counts;
  int64_t limit = std::min(cap, kFirstBucketBytes);
  int64_t filled = 0;
  size_t count = 0;
  for (auto next = bytes.rbegin(); next != bytes.rend(); ++next) {
    if (count > 0 && filled + *next > limit) {
      counts.push_back(std::exchange(count, 0));
      filled = 0;
      limit = cap;
    }
    filled += *next;
    ++count;
  }
  if (count > 0) {
    counts.push_back(count);
  }
  return counts;
}

GradientBuckets::GradientBuckets(GradientReduction::Options options) : options_(std::move(options)) {
  cut({options_.dims.size()});
}

void GradientBuckets::cut(const std::vector<size_t>& counts) {
  const auto is_same = [](const Part& part, size_t count) { return part.count == count; };
  if (std::equal(parts_.begin(), parts_.end(), counts.begin(), counts.end(), is_same)) {
    return;
  }
  parts_.clear();
  size_t end = options_.dims.size();
  for (const auto count : counts) {
    TESSERA_ASSERT(count <= end, "parts of more than {} parameters", options_.dims.size());
    end -= count;
    auto options = options_;
    const auto first = options_.dims.begin() + static_cast<std::ptrdiff_t>(end);
    options.dims.assign(first, first + static_cast<std::ptrdiff_t>(count));
    parts_.push_back({.first = end, .count = count, .reduction = GradientReduction(std::move(options))});
  }
  TESSERA_ASSERT(end == 0, "parts lack the first {} parameters", end);
}

size_t GradientBuckets::part_of(size_t param) const {
  const auto part = std::find_if(parts_.begin(), parts_.end(), [&](const Part& p) { return p.first <= param; });
  return static_cast<size_t>(part - parts_.begin());
}

void GradientBuckets::begin(std::span<const ShardedParam> params) {
  if (size() == 1) {
    return;
  }
  next_ = 0;
  for (auto& part : parts_) {
    const auto own = params.subspan(part.first, part.count);
    part.waits_for = std::count_if(own.begin(), own.end(), [](const auto& param) { return param.requires_grad(); });
  }
}

}  // namespace tessera
