#pragma once
// DTensorSpec: everything about a DTensor but its data. Immutable and shared between tensors, so that
// comparing two specs is mostly comparing two pointers, and sharding propagation can be cached by hash.
//
// Thread safety: immutable after construction; may be shared between threads.

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <string>
#include <vector>

#include "device_mesh/device_mesh.h"
#include "dtensor/spec/placement.h"
#include "dtensor/spec/shard_math.h"

namespace tessera {

/// Sizes, strides (both of the whole, global tensor, in elements) and dtype.
struct TensorMeta {
  DimVector sizes;
  DimVector strides;
  at::ScalarType dtype = at::ScalarType::Float;

  static TensorMeta of(const at::Tensor& tensor);
  /// Row-major.
  static TensorMeta contiguous(at::IntArrayRef sizes, at::ScalarType dtype);
  bool is_contiguous() const;
  bool operator==(const TensorMeta&) const = default;
};

class DTensorSpec;
using SpecPtr = c10::intrusive_ptr<DTensorSpec>;

class DTensorSpec : public c10::intrusive_ptr_target {
 public:
  /// The spec that this thread made before, if it is equal, over the same groups of the same root mesh, and still in
  /// use: so most comparisons end at equal pointers. `placements` must be normalized(). Throws ValueError for an empty
  /// mesh.
  static SpecPtr make(DeviceMesh mesh, Placements placements, TensorMeta meta);
  /// The same mesh and tensor under other (normalized) placements, and row-major if `contiguous`.
  SpecPtr with_placements(Placements placements, bool contiguous = false) const;
  SpecPtr with_dtype(at::ScalarType dtype) const;

  const DeviceMesh& mesh() const { return mesh_; }
  const Placements& placements() const { return placements_; }
  const TensorMeta& meta() const { return meta_; }
  at::IntArrayRef sizes() const { return meta_.sizes; }
  at::IntArrayRef strides() const { return meta_.strides; }
  at::ScalarType dtype() const { return meta_.dtype; }
  int64_t ndim() const { return static_cast<int64_t>(meta_.sizes.size()); }
  /// Sizes of this rank's local tensor.
  at::IntArrayRef local_sizes() const { return local_sizes_; }
  MeshPosition position() const;

  bool is_replicated() const;
  bool has_partial() const;

  uint64_t hash() const { return hash_; }
  /// Specs that are equal over the same groups of the same root mesh have equal ones (DeviceMesh::groups_hash()).
  uint64_t hash_with_groups() const { return hash_with_groups_; }
  bool operator==(const DTensorSpec& other) const;

  /// "Float[5, 3] (Shard(0)) on DeviceMesh(cpu, {dp: 2})"
  std::string to_string() const;

  DTensorSpec(DeviceMesh mesh, Placements placements, TensorMeta meta);
  /// When the last owner is gone: those that only remember the spec (make()) do not keep the mesh's groups.
  void release_resources() override { mesh_ = {}; }

 private:
  DeviceMesh mesh_;
  Placements placements_;
  TensorMeta meta_;
  DimVector local_sizes_;
  uint64_t hash_ = 0;
  uint64_t hash_with_groups_ = 0;
};

inline bool same_spec(const SpecPtr& a, const SpecPtr& b) {
  return a == b || (a && b && a->hash() == b->hash() && *a == *b);
}

/// Equal meshes may communicate over groups of their own, or be parts of different ones (DeviceMesh::from_group).
inline bool same_spec_and_groups(const SpecPtr& a, const SpecPtr& b) {
  return a == b || (same_spec(a, b) &&
                    (!a || (a->mesh().shares_groups_with(b->mesh()) && a->mesh().shares_root_with(b->mesh()))));
}

/// "Float[5, 3]"
std::string to_string(const TensorMeta& meta);

}  // namespace tessera
