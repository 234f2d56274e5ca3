#include "dtensor/spec/dtensor_spec.h"

#include <c10/util/strides.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <optional>

#include "base/error.h"
#include "base/hash.h"

namespace tessera {

TensorMeta TensorMeta::of(const at::Tensor& tensor) {
  return {.sizes = DimVector(tensor.sizes().begin(), tensor.sizes().end()),
          .strides = DimVector(tensor.strides().begin(), tensor.strides().end()),
          .dtype = tensor.scalar_type()};
}

TensorMeta TensorMeta::contiguous(at::IntArrayRef sizes, at::ScalarType dtype) {
  return {.sizes = DimVector(sizes.begin(), sizes.end()), .strides = c10::contiguous_strides(sizes), .dtype = dtype};
}

bool TensorMeta::is_contiguous() const {
  int64_t expected = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    if (sizes[i] == 0) {
      return true;
    }
    if (sizes[i] != 1 && strides[i] != expected) {
      return false;
    }
    expected *= sizes[i];
  }
  return true;
}

std::string to_string(const TensorMeta& meta) {
  return fmt::format("{}[{}]", c10::toString(meta.dtype), fmt::join(meta.sizes.begin(), meta.sizes.end(), ", "));
}

DTensorSpec::DTensorSpec(DeviceMesh mesh, Placements placements, TensorMeta meta)
    : mesh_(std::move(mesh)), placements_(std::move(placements)), meta_(std::move(meta)) {
  TESSERA_CHECK(ValueError, mesh_.defined(), "DTensor: the mesh is empty; make one with init_device_mesh");
  local_sizes_ = tessera::local_sizes(meta_.sizes, placements_, position());
  hash_ = hash_combine(mesh_.hash(), static_cast<uint64_t>(meta_.dtype));
  for (const auto& placement : placements_) {
    hash_ = hash_combine(hash_, placement.hash());
  }
  for (size_t i = 0; i < meta_.sizes.size(); ++i) {
    hash_ = hash_combine(hash_, static_cast<uint64_t>(meta_.sizes[i]));
    hash_ = hash_combine(hash_, static_cast<uint64_t>(meta_.strides[i]));
  }
  hash_with_groups_ = hash_combine(hash_, mesh_.groups_hash());
}

SpecPtr DTensorSpec::make(DeviceMesh mesh, Placements placements, TensorMeta meta) {
  // Slots by hash; the most recent one stays.
  thread_local std::array<std::optional<c10::weak_intrusive_ptr<DTensorSpec>>, 1024> recent;
  auto spec = c10::make_intrusive<DTensorSpec>(std::move(mesh), std::move(placements), std::move(meta));
  auto& place = recent[spec->hash_ % recent.size()];
  if (const auto found = place ? place->lock() : SpecPtr(); found && same_spec_and_groups(found, spec)) {
    return found;
  }
  place.emplace(spec);
  return spec;
}

SpecPtr DTensorSpec::with_placements(Placements placements, bool contiguous) const {
  return make(mesh_, std::move(placements), contiguous ? TensorMeta::contiguous(meta_.sizes, meta_.dtype) : meta_);
}

SpecPtr DTensorSpec::with_dtype(at::ScalarType dtype) const {
  auto meta = meta_;
  meta.dtype = dtype;
  return make(mesh_, placements_, std::move(meta));
}

MeshPosition DTensorSpec::position() const {
  return {.axis_sizes = mesh_.shape(), .coordinate = mesh_.coordinate()};
}

bool DTensorSpec::is_replicated() const {
  return std::all_of(placements_.begin(), placements_.end(), [](const Placement& p) { return p.is_replicate(); });
}

bool DTensorSpec::has_partial() const {
  return std::any_of(placements_.begin(), placements_.end(), [](const Placement& p) { return p.is_partial(); });
}

bool DTensorSpec::operator==(const DTensorSpec& other) const {
  return placements_ == other.placements_ && meta_ == other.meta_ && mesh_ == other.mesh_;
}

std::string DTensorSpec::to_string() const {
  return fmt::format("{} {} on {}", tessera::to_string(meta_), tessera::to_string(placements_), mesh_);
}

}  // namespace tessera
