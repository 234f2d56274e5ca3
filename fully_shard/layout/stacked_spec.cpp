#include "fully_shard/layout/stacked_spec.h"

#include <fmt/format.h>

#include <algorithm>

namespace tessera {

Placements stacked_placements(const Placements& dp, const Placements& tp) {
  Placements stacked = dp;
  stacked.append(tp.begin(), tp.end());
  c10::SmallVector<size_t, 4> order;
  for (const size_t axis : shard_order(tp)) {
    order.push_back(dp.size() + axis);
  }
  for (const size_t axis : shard_order(dp)) {
    order.push_back(axis);
  }
  return with_shard_order(std::move(stacked), order);
}

std::string why_not_stacked(const DeviceMesh& dp, const DeviceMesh& tp) {
  if (dp.root() != tp.root()) {
    return fmt::format(
        "{} and {} are not parts of one mesh (their roots are {} and {}); take both from one, as "
        "mesh[\"dp\"] and mesh[\"tp\"]",
        dp, tp, dp.root(), tp.root());
  }
  const auto& names = dp.axis_names();
  const bool share_name = std::ranges::any_of(
      tp.axis_names(), [&](const auto& name) { return std::ranges::find(names, name) != names.end(); });
  const auto shared_ranks = std::ranges::count_if(
      tp.ranks(), [&](int64_t rank) { return std::ranges::find(dp.ranks(), rank) != dp.ranks().end(); });
  if (share_name || shared_ranks > 1) {
    return fmt::format("{} and {} overlap; each axis of {} either shards by tensor parallelism or carries data", dp, tp,
                       dp.root());
  }
  return "";
}

DeviceMesh stacked_mesh(const DeviceMesh& dp, const DeviceMesh& tp) {
  auto names = dp.axis_names();
  names.insert(names.end(), tp.axis_names().begin(), tp.axis_names().end());
  return dp.root()[names];
}

SpecPtr stacked_spec(const DeviceMesh& dp, const Placements& placements, const DTensorSpec& tp) {
  return DTensorSpec::make(stacked_mesh(dp, tp.mesh()), stacked_placements(placements, tp.placements()),
                           TensorMeta::contiguous(tp.sizes(), tp.dtype()));
}

}  // namespace tessera
