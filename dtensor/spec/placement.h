#pragma once
// Placements: how a tensor is distributed along one axis of a device mesh.
//
//   Shard(dim)     each rank has a slice of `dim`, as torch.chunk makes it: ceil(size / n) each, the last ones
//                  smaller or empty; a negative dim counts from the end
//   Replicate()    each rank has the whole tensor
//   Partial(op)    each rank has a term; the tensor is the reduction of all terms by `op`
//
// A DTensor has one placement per axis: on the mesh {dp: 2, tp: 2}, {Shard(0), Replicate()} shards dim 0 over dp and
// replicates it over tp. Two axes may shard the same dim. The earlier axis then shards first, unless orders say
// otherwise: if tensor parallelism shards a weight's rows first and FSDP second, it is {Shard(0, 1), Shard(0)}, with
// order 0 for tp and order 1 for dp. PyTorch writes _StridedShard(0, split_factor=2); an order does not require even
// sizes.
//
// docs/semantics.md covers Partial tensors in linear ops and in low precision.
// Thread safety: values. Source: torch/distributed/tensor/placement_types.py.

#include <c10/util/SmallVector.h>
#include <fmt/format.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

#include "comm/backend/reduce_op.h"

namespace tessera {

class Placement {
 public:
  bool is_replicate() const { return kind_ == Kind::Replicate; }
  bool is_shard() const { return kind_ == Kind::Shard; }
  bool is_shard(int64_t dim) const { return kind_ == Kind::Shard && dim_ == dim; }
  /// Returns whether a reduction is pending, including NormPartial.
  bool is_partial() const { return kind_ == Kind::Partial || kind_ == Kind::NormPartial; }
  bool is_partial(ReduceOp op) const { return kind_ == Kind::Partial && op_ == op; }
  bool is_norm_partial() const { return kind_ == Kind::NormPartial; }

  /// Returns the sharded dim. Requires is_shard().
  int64_t dim() const { return dim_; }
  /// Returns the order if several axes shard one dim: lower orders shard first, equal ones in the order of axes.
  /// Requires is_shard().
  int order() const { return order_; }
  /// Returns the pending reduction. Requires is_partial() without is_norm_partial().
  ReduceOp reduce_op() const { return op_; }
  /// Returns the p of a pending p-norm. Requires is_norm_partial().
  double norm_type() const { return norm_type_; }

  bool operator==(const Placement& other) const = default;
  /// Returns this placement with order 0.
  Placement without_order() const;

  /// Returns the placement as written in C++: "Shard(0)", "Shard(0, 1)", "Replicate()", "Partial(Sum)".
  std::string to_string() const;
  uint64_t hash() const;

 protected:
  enum class Kind : uint8_t { Replicate, Shard, Partial, NormPartial };
  Placement(Kind kind, int64_t dim, ReduceOp op, double norm_type = 0, int order = 0)
      : kind_(kind),
        op_(op),
        order_(static_cast<int16_t>(order)),
        dim_(static_cast<int32_t>(dim)),
        norm_type_(norm_type) {}

 private:
  Kind kind_;
  ReduceOp op_;
  int16_t order_;
  int32_t dim_;
  double norm_type_;
};

// Types that make `Shard(0)` read like Python; they add nothing to Placement and may be sliced.
class Shard : public Placement {
 public:
  explicit Shard(int64_t dim, int order = 0) : Placement(Kind::Shard, dim, ReduceOp::Sum, 0, order) {}
};

class Replicate : public Placement {
 public:
  Replicate() : Placement(Kind::Replicate, 0, ReduceOp::Sum) {}
};

class Partial : public Placement {
 public:
  explicit Partial(ReduceOp op = ReduceOp::Sum) : Placement(Kind::Partial, 0, op) {}
};

/// Placement of terms that are p-norms; the tensor is (sum term^p)^(1/p). A norm over many sharded tensors (gradient
/// clipping) then costs one reduction. Made by the library only; from_local rejects it.
class NormPartial : public Placement {
 public:
  explicit NormPartial(double p) : Placement(Kind::NormPartial, 0, ReduceOp::Sum, p) {}
};

/// Returns the placement of p-norms of shards; nullopt if they do not determine the norm.
std::optional<Placement> norm_placement(double p);

/// One placement per axis. Up to four axes need no allocation.
using Placements = c10::SmallVector<Placement, 4>;

/// Returns a text such as "(Shard(0), Replicate())".
std::string to_string(const Placements& placements);

/// Returns the sharding axes in order: of two that shard the same dim, the one that shards first comes first.
c10::SmallVector<size_t, 4> shard_order(const Placements& placements);

/// Returns `placements` with orders such that axes shard each dim in the order of `axes`, which has each axis once.
/// Orders are minimal: 0 if a dim is sharded in the order of the mesh's axes.
Placements with_shard_order(Placements placements, const c10::SmallVector<size_t, 4>& axes);

/// Returns `placements` with non-negative dims and minimal orders, so that equal layouts have equal placements. The
/// tensor has `ndim` dims and the mesh `mesh_ndim` axes.
/// Throws ValueError, naming `where`, for another number of placements, a dim or order out of range, or pending
/// reductions of several axes that do not commute, such as Sum and Max.
Placements normalized(Placements placements, int64_t ndim, int64_t mesh_ndim, const char* where);

}  // namespace tessera

template <>
struct fmt::formatter<tessera::Placement> : fmt::formatter<std::string> {
  auto format(const tessera::Placement& placement, fmt::format_context& context) const {
    return fmt::formatter<std::string>::format(placement.to_string(), context);
  }
};
template <>
struct fmt::formatter<tessera::Shard> : fmt::formatter<tessera::Placement> {};
template <>
struct fmt::formatter<tessera::Replicate> : fmt::formatter<tessera::Placement> {};
template <>
struct fmt::formatter<tessera::Partial> : fmt::formatter<tessera::Placement> {};
