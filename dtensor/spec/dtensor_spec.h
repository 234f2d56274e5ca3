#pragma once
// DTensorSpec: everything about a DTensor except its data. Immutable and shared between tensors, so most comparisons of
// specs compare pointers, and sharding propagation is cached by hash.
// Thread safety: immutable after construction; threads may share it.

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <string>
#include <vector>

#include "device_mesh/device_mesh.h"
#include "dtensor/spec/placement.h"
#include "dtensor/spec/shard_math.h"

namespace tessera {

/// Global sizes and strides (in elements), and dtype.
struct TensorMeta {
  DimVector sizes;
  DimVector strides;
  at::ScalarType dtype = at::ScalarType::Float;

  static TensorMeta of(const at::Tensor& tensor);
  /// Returns the meta of a row-major tensor.
  static TensorMeta contiguous(at::IntArrayRef sizes, at::ScalarType dtype);
  bool is_contiguous() const;
  bool operator==(const TensorMeta&) const = default;
};

class DTensorSpec;
using SpecPtr = c10::intrusive_ptr<DTensorSpec>;

class DTensorSpec : public c10::intrusive_ptr_target {
 public:
  /// Returns this thread's earlier spec if one is equal, over the same groups of the same root mesh, and in use.
  /// `placements` must be normalized(). Throws ValueError for an empty mesh.
  static SpecPtr make(DeviceMesh mesh, Placements placements, TensorMeta meta);
  /// Returns the spec with other (normalized) placements, row-major if `contiguous`.
  SpecPtr with_placements(Placements placements, bool contiguous = false) const;
  SpecPtr with_dtype(at::ScalarType dtype) const;

  const DeviceMesh& mesh() const { return mesh_; }
  const Placements& placements() const { return placements_; }
  const TensorMeta& meta() const { return meta_; }
  at::IntArrayRef sizes() const { return meta_.sizes; }
  at::IntArrayRef strides() const { return meta_.strides; }
  at::ScalarType dtype() const { return meta_.dtype; }
  int64_t ndim() const { return static_cast<int64_t>(meta_.sizes.size()); }
  /// Returns the sizes of this rank's local tensor.
  at::IntArrayRef local_sizes() const { return local_sizes_; }
  MeshPosition position() const;

  bool is_replicated() const;
  bool has_partial() const;

  uint64_t hash() const { return hash_; }
  /// Returns a hash that is equal for equal specs over the same groups of the same root mesh
  /// (DeviceMesh::groups_hash()).
  uint64_t hash_with_groups() const { return hash_with_groups_; }
  bool operator==(const DTensorSpec& other) const;

  /// Returns a text such as "Float[5, 3] (Shard(0)) on DeviceMesh(cpu, {dp: 2})".
  std::string to_string() const;

  DTensorSpec(DeviceMesh mesh, Placements placements, TensorMeta meta);
  /// Releases the mesh's groups with the last owner, as make() keeps weak references.
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

/// Returns whether specs are equal and use the same groups and root mesh; equal meshes may not
/// (DeviceMesh::from_group).
inline bool same_spec_and_groups(const SpecPtr& a, const SpecPtr& b) {
  return a == b || (same_spec(a, b) &&
                    (!a || (a->mesh().shares_groups_with(b->mesh()) && a->mesh().shares_root_with(b->mesh()))));
}

/// Returns a text such as "Float[5, 3]".
std::string to_string(const TensorMeta& meta);

}  // namespace tessera
