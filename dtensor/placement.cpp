#include "dtensor/placement.h"

#include <fmt/ranges.h>

#include "base/error.h"
#include "base/hash.h"

namespace tessera {

std::string Placement::to_string() const {
  switch (kind_) {
    case Kind::Replicate:
      return "Replicate()";
    case Kind::Shard:
      return fmt::format("Shard({})", dim_);
    case Kind::Partial:
      return fmt::format("Partial({})", op_);
    case Kind::NormPartial:
      return fmt::format("NormPartial({})", norm_type_);
  }
  TESSERA_ASSERT(false, "placement kind {}", static_cast<int>(kind_));
}

uint64_t Placement::hash() const {
  uint64_t value = hash_combine(static_cast<uint64_t>(kind_), static_cast<uint64_t>(dim_));
  value = hash_combine(value, static_cast<uint64_t>(op_));
  return hash_combine(value, hash_double(norm_type_));
}

std::string to_string(const Placements& placements) {
  std::string text = "(";
  for (size_t axis = 0; axis < placements.size(); ++axis) {
    text += (axis ? ", " : "") + placements[axis].to_string();
  }
  return text + ")";
}

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
    placement = Shard(dim);
  }
  return placements;
}

}  // namespace tessera
