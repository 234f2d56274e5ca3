#include "dtensor/spec/placement.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <limits>

#include "base/error.h"
#include "base/hash.h"

namespace tessera {

std::string Placement::to_string() const {
  switch (kind_) {
    case Kind::Replicate:
      return "Replicate()";
    case Kind::Shard:
      return order_ == 0 ? fmt::format("Shard({})", dim_) : fmt::format("Shard({}, {})", dim_, order_);
    case Kind::Partial:
      return fmt::format("Partial({})", op_);
    case Kind::NormPartial:
      return fmt::format("NormPartial({})", norm_type_);
  }
  TESSERA_ASSERT(false, "placement kind {}", static_cast<int>(kind_));
}

Placement Placement::without_order() const {
  Placement result = *this;
  result.order_ = 0;
  return result;
}

uint64_t Placement::hash() const {
  uint64_t value = hash_combine(static_cast<uint64_t>(kind_), static_cast<uint64_t>(dim_));
  value = hash_combine(value, static_cast<uint64_t>(order_));
  value = hash_combine(value, static_cast<uint64_t>(op_));
  return hash_combine(value, hash_double(norm_type_));
}

std::optional<Placement> norm_placement(double p) {
  if (p == std::numeric_limits<double>::infinity()) {
    return Partial(ReduceOp::Max);
  }
  if (p == 0 || p == 1) {
    return Partial();
  }
  return p > 0 ? std::optional<Placement>(NormPartial(p)) : std::nullopt;
}

std::string to_string(const Placements& placements) {
  std::string text = "(";
  for (size_t axis = 0; axis < placements.size(); ++axis) {
    text += (axis ? ", " : "") + placements[axis].to_string();
  }
  return text + ")";
}

c10::SmallVector<size_t, 4> shard_order(const Placements& placements) {
  c10::SmallVector<size_t, 4> axes;
  for (size_t axis = 0; axis < placements.size(); ++axis) {
    if (placements[axis].is_shard()) {
      axes.push_back(axis);
    }
  }
  std::stable_sort(axes.begin(), axes.end(),
                   [&](size_t a, size_t b) { return placements[a].order() < placements[b].order(); });
  return axes;
}

Placements with_shard_order(Placements placements, const c10::SmallVector<size_t, 4>& axes) {
  for (size_t i = 0; i < axes.size(); ++i) {
    const Placement cut = placements[axes[i]];
    if (!cut.is_shard()) {
      continue;
    }
    int before = 0;         // earlier axes that shard the same dim
    bool ascending = true;  // whether all axes that shard the dim are in order
    size_t previous = 0;
    for (size_t k = 0; k < axes.size(); ++k) {
      if (placements[axes[k]].is_shard(cut.dim())) {
        ascending = ascending && axes[k] >= previous;
        previous = axes[k];
        before += k < i ? 1 : 0;
      }
    }
    placements[axes[i]] = Shard(cut.dim(), ascending ? 0 : before);
  }
  return placements;
}

namespace {

/// Sums and averages may be reduced in any order of axes; other reductions only with their own kind.
bool reductions_commute(const Placement& a, const Placement& b) {
  const auto linear = [](const Placement& p) { return p.is_partial(ReduceOp::Sum) || p.is_partial(ReduceOp::Avg); };
  return a == b || (linear(a) && linear(b));
}

void check_reductions_commute(const Placements& placements, const char* where) {
  const Placement* first = nullptr;
  for (const auto& placement : placements) {
    if (placement.is_partial()) {
      TESSERA_CHECK(
          ValueError, !first || reductions_commute(*first, placement),
          "{}: {}: the result would depend on which axis is reduced first; use one reduction on all axes (Sum "
          "and Avg go together)",
          where, to_string(placements));
      first = &placement;
    }
  }
}

}  // namespace

Placements normalized(Placements placements, int64_t ndim, int64_t mesh_ndim, const char* where) {
  TESSERA_CHECK(ValueError, static_cast<int64_t>(placements.size()) == mesh_ndim,
                "{}: {} placements {} for a mesh of {} axes; give one placement an axis", where, placements.size(),
                to_string(placements), mesh_ndim);
  for (auto& placement : placements) {
    if (!placement.is_shard()) {
      continue;
    }
    const int64_t dim = placement.dim() < 0 ? placement.dim() + ndim : placement.dim();
    TESSERA_CHECK(ValueError, dim >= 0 && dim < ndim, "{}: {} on a tensor of {} dims; dim must be in [{}, {}]{}", where,
                  placement.to_string(), ndim, -ndim, ndim - 1, ndim == 0 ? "; use Replicate() for a scalar" : "");
    TESSERA_CHECK(ValueError, placement.order() >= 0, "{}: {}; an order is at least 0", where, placement.to_string());
    placement = Shard(dim, placement.order());
  }
  check_reductions_commute(placements, where);
  const auto axes = shard_order(placements);
  return with_shard_order(std::move(placements), axes);
}

}  // namespace tessera
